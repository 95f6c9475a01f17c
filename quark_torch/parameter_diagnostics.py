"""ParameterDiagnostics: what parameters, their gradients and their updates are like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time_ns
from types import TracebackType
from typing import Any, Self

import torch

from quark_core.errors import InvalidRunStateError, SchemaValidationError, SessionStoreError
from quark_core.json_object import JsonObject, normalize_object
from quark_core.opening import resolve_target
from quark_core.query import check_index
from quark_core.records import ParameterDistributionRecord, ParameterSummaryRecord
from quark_torch.gradient_scale import GradientScale
from quark_torch.instrumentation_notices import InstrumentationNotices
from quark_torch.micro_batches import MicroBatches
from quark_torch.optimizer_steps import OptimizerSteps
from quark_torch.parameter_config import ParameterDiagnosticsConfig
from quark_torch.parameter_list import (
    ListedParameter,
    ParameterList,
    list_optimizers,
    locate_parameters,
)
from quark_torch.parameter_measuring import (
    EarlyGradient,
    ParameterReading,
    measure_gradients,
    read_parameters,
)
from quark_torch.parameter_reading import ParameterReadback
from quark_torch.parameter_recording import DistributionWriter, SummaryWriter, merge_metadata

__all__ = ["ParameterDiagnostics", "ParameterDiagnosticsConfig"]

Snapshot = tuple[tuple[ParameterSummaryRecord, ...], tuple[ParameterDistributionRecord, ...]]

_NOTHING: Snapshot = ((), ())
_INT64_MAX = 2**63 - 1
_LISTED_NAMES = 20


class ParameterDiagnostics(ParameterReadback):
    """Records what parameters, their gradients and their last updates are like.

    Call `snapshot(step)` once a step, right after `optimizer.step()`: off
    schedule it takes microseconds and does nothing. On schedule every
    parameter and gradient is read once and nothing of them is kept. A tied
    parameter is recorded once, under its first name, with `aliases` in the
    metadata.

    Updates are true differences: before the optimizer's step that is expected
    to be the last one before a snapshot that is due, its parameters are
    copied into buffers, and the snapshot compares. The expectation follows
    the steps that were given to `snapshot`, due or not. Where it was wrong, or
    the optimizer made no step, the update's fields are None and the metadata
    has `update_missing` with the reason: `no_optimizer_step`,
    `step_not_foreseen`, `optimizer_step_failed`, `not_copied`, `copy_failed`,
    `cannot_be_measured`, `optimizer_has_no_step_hooks`. Where a GradScaler
    left the step out, the update is 0, with `skipped` in the metadata.

    The buffers take as much memory as the parameters that are both chosen and
    in an optimizer, on their devices; they are kept from the first copy to
    `close`, so that no step pays for allocation twice.

    Gradients are those of the snapshot: after the optimizer's step, as it left
    them, summed over micro-batches, unscaled. Where they sum up several, the
    metadata has `accumulated` with their number, if the snapshot was foreseen
    and nothing else changed gradients in between, such as clipping after each.
    It is counted by the last trained parameter of each optimizer. A loop that clears gradients
    before the snapshot is noticed at the first one, which has
    `gradient_missing` in its metadata; from then on gradients are read at the
    end of the optimizer's step.

    Of a sharded parameter (DTensor) the statistics, shape and element count
    are of the local shard, with `scope` and `global_shape` in the metadata;
    nothing is gathered. What cannot be read (meta tensors, for example) has a
    record without statistics, and is told of once by an event.

    Nothing that fails in here reaches the training loop: it is told of once,
    by an event `instrumentation_failed`. In strict mode it is raised. Every
    method may be called from any thread, but not while another one runs the
    backward pass of the same model: PyTorch guards no gradient against that.
    On a GPU a due snapshot waits for it.

    Args:
        session: A TrainingSession, or the RunContext of one.
        model: The model, wrapped or not. Parameters that come and go are seen
            at the next snapshot.
        optimizer: Its optimizer, a sequence of them, or None.
        config: What is looked at, and when; the defaults for None.

    Raises:
        SchemaValidationError: A bad argument; the message names it.
    """

    def __init__(
        self,
        session: object,
        model: torch.nn.Module,
        optimizer: Any = None,
        *,
        config: ParameterDiagnosticsConfig | None = None,
    ) -> None:
        if config is None:
            config = ParameterDiagnosticsConfig()
        elif not isinstance(config, ParameterDiagnosticsConfig):
            raise SchemaValidationError(
                f"config must be a ParameterDiagnosticsConfig or None, not {type(config).__name__}"
            )
        if not isinstance(model, torch.nn.Module):
            raise SchemaValidationError(
                f"model must be a torch.nn.Module, not a {type(model).__name__}"
            )
        optimizers = list_optimizers(optimizer)
        self._run = run = resolve_target(session)
        self._config = config
        self._model = model
        self._optimizers = optimizers
        self._notices = InstrumentationNotices(run, "ParameterDiagnostics")
        self._closed = False
        self._parameters = ParameterList(model, config)
        self._listed: list[ListedParameter] | None = None
        self._early: dict[int, EarlyGradient] = {}
        self._clears_gradients = False
        self._scale = GradientScale(config.grad_scaler, optimizers)
        self._micro_batches = MicroBatches(optimizers, self._parameters, self._notices.fail)
        self._steps = OptimizerSteps(
            optimizers,
            copies=config.captures_updates,
            choose=self._choose,
            is_due=config.schedule.is_due,
            is_over=lambda: run.is_over,
            on_failure=self._notices.fail,
            on_end=self._measure_early,
            guard=lambda: self._summaries.lock,
        )
        self._summaries = SummaryWriter(session, batch_size=config.batch_size)
        self._distributions = DistributionWriter(session, batch_size=config.batch_size)
        try:
            self._check_what_is_given()
            self._steps.attach()
            self._micro_batches.begin()
        except Exception:
            # The run counts its writers.
            self.close()
            raise

    @property
    def config(self) -> ParameterDiagnosticsConfig:
        """As it was given, or the defaults."""
        return self._config

    @property
    def kept_bytes(self) -> int:
        """Memory that the copies of parameters take now."""
        return self._steps.kept_bytes

    def snapshot(
        self, step: int, *, epoch: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Snapshot:
        """Record every chosen parameter as it is now, where the schedule says so.

        Args:
            step: Step counter; it may go backwards.
            epoch: Epoch counter, or None.
            metadata: JSON values for every record, taken as they are now; a key
                of theirs wins over one of ours. Not looked at off schedule.

        Returns:
            The summaries and the histograms; both empty off schedule.

        Raises:
            SchemaValidationError: A bad argument; the message names it.
            InvalidRunStateError: This object is closed or the run has ended.
        """
        if self._closed or self._run.refusal is not None:
            self._check_open("snapshot")
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = _require_step(step)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_index(epoch, "epoch")
        if not self._config.schedule.is_due(step):
            self._foresee(step)
            return _NOTHING
        own = normalize_object(metadata, "metadata") or None
        if torch.compiler.is_compiling():
            return _NOTHING
        with self._summaries.lock:
            try:
                return self._take(step, epoch, own)
            except Exception as error:  # noqa: BLE001 - training must go on
                self._notices.fail("snapshot_failed", error, step=step)
                return _NOTHING
            finally:
                self._listed = None
                self._early.clear()
                self._foresee(step)

    def flush(self) -> Snapshot:
        """Deliver every accepted record of this run to the primary store.

        Returns:
            This object's records since the last flush, or since `batch_size`
            of the kind last filled. Nothing where no store is kept.

        Raises:
            SessionStoreError: The store did not acknowledge in time; the
                records stay queued and are delivered later.
        """
        return self._summaries.flush(), self._distributions.flush()

    def close(self) -> None:
        """Leave the optimizers, free the copies and take no more snapshots.

        Reading still works. A second call does nothing.

        Raises:
            SessionStoreError: In strict mode, the primary's first delivery error.
        """
        if self._closed:
            return
        self._closed = True
        self._micro_batches.end()
        self._steps.close()
        self._parameters.forget()
        self._listed = None
        self._early.clear()
        try:
            self._summaries.close()
        finally:
            self._distributions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SessionStoreError:
            # The user's exception must not be replaced by ours.
            if error is None:
                raise

    def _take(self, step: int, epoch: int | None, own: JsonObject | None) -> Snapshot:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._notices.warn(
                "cuda_graph_capture",
                "snapshot() was called while a CUDA graph is captured, and did nothing",
                step=step,
            )
            return _NOTHING
        config = self._config
        time_us = time_ns() // 1000
        with torch.no_grad():
            readings = read_parameters(
                self._parameters.find(),
                locate_parameters(self._optimizers),
                self._steps,
                config,
                self._early,
                self._find_scale,
                self._was_skipped,
                self._micro_batches.find,
            )
        self._scale.note()
        if any(reading.is_cleared for reading in readings):
            self._clears_gradients = True
        summaries: list[ParameterSummaryRecord] = []
        distributions: list[ParameterDistributionRecord] = []
        unread: list[str] = []
        for reading in readings:
            merged = merge_metadata(reading.metadata, own, own)
            if config.capture_summaries:
                if reading.value is None and reading.local.numel():
                    unread.append(reading.listed.name)
                summaries.append(
                    self._summaries.add(
                        reading,
                        time_us,
                        step,
                        epoch,
                        merged,
                        has_optimizer=bool(self._optimizers),
                    )
                )
            distributions.extend(
                self._distributions.add(
                    reading.listed, kind, reading.histograms[kind], time_us, step, epoch, merged
                )
                for kind in config.distribution_types
                if kind in reading.histograms
            )
        if unread:
            self._notices.warn(
                "parameters_unread",
                "parameters without statistics, because their elements cannot be read (such as "
                "meta tensors and tensors of foreign libraries)",
                step=step,
                parameters=unread[:_LISTED_NAMES],
                count=len(unread),
            )
        return tuple(summaries), tuple(distributions)

    def _foresee(self, step: int) -> None:
        if self._steps.foresee(step):
            self._micro_batches.begin()
        else:
            self._micro_batches.end()

    def _choose(self, optimizer_index: int) -> Sequence[torch.Tensor]:
        """The parameters to copy before an optimizer's step."""
        if self._listed is None:
            self._listed = self._parameters.find()
            self._places = locate_parameters(self._optimizers)
        return [
            listed.parameter
            for listed in self._listed
            if listed.parameter.requires_grad
            and (place := self._places.get(id(listed.parameter))) is not None
            and place.optimizer_index == optimizer_index
        ]

    def _measure_early(self, optimizer_index: int) -> None:
        """Read gradients at the end of a step, in a loop that clears them before the snapshot."""
        if self._clears_gradients:
            with torch.no_grad():
                found = measure_gradients(self._choose(optimizer_index), self._config)
            self._early.update(found)

    def _find_scale(self, optimizer_index: int) -> float:
        if optimizer_index >= 0 and self._optimizers:
            stepped = self._steps.has_stepped(optimizer_index)
            return self._scale.find(optimizer_index, stepped=stepped)
        return 1.0

    def _was_skipped(self, readings: Sequence[ParameterReading]) -> bool:
        return self._scale.has_fallen or any(
            reading.gradient is not None and reading.gradient.nan_count + reading.gradient.inf_count
            for reading in readings
        )

    def _check_what_is_given(self) -> None:
        """Tell of a model, filter, schedule or optimizer that will give nothing."""
        config, notices = self._config, self._notices
        if config.schedule.never_fires:
            notices.warn(
                "schedule_never_fires",
                "ParameterDiagnostics takes no snapshot: its schedule has every_n_steps=None and "
                "no explicit_steps",
            )
        if not (config.capture_summaries or config.capture_distributions):
            notices.warn(
                "nothing_captured",
                "ParameterDiagnostics records nothing: capture_summaries and "
                "capture_distributions are both False",
            )
        identities = {id(parameter) for parameter in self._model.parameters()}
        if not identities:
            notices.warn(
                "model_without_parameters",
                f"the model, a {type(self._model).__name__}, has no parameters so far",
            )
        elif not self._parameters.find():
            notices.warn(
                "filter_matches_nothing",
                "ParameterDiagnostics records nothing: its parameter patterns and roles choose "
                f"none of the model's {len(identities)} parameters",
            )
        for index, optimizer in enumerate(self._optimizers):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if identities and held.isdisjoint(identities):
                notices.warn(
                    "optimizer_of_another_model",
                    f"{type(optimizer).__name__} (optimizer {index}) holds none of the "
                    "parameters of this model: was it made for another one, or before the "
                    "model's parameters were replaced?",
                    key=index,
                )

    def _check_open(self, call: str) -> None:
        if self._run.refusal is not None:
            self._run.refuse(call)
        raise InvalidRunStateError(f"{call}: this ParameterDiagnostics is closed")


def _require_step(step: object) -> int:
    checked = check_index(step, "step")
    if checked is None:
        raise SchemaValidationError("step must be given")
    return checked
