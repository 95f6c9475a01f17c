"""ParameterDiagnostics: what parameters, their gradients and their updates are like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time_ns
from types import TracebackType
from typing import Any, Self

import torch

from quark_core.api import (
    InvalidRunStateError,
    JsonObject,
    OpenRun,
    ParameterDistributionRecord,
    ParameterSummaryRecord,
    SessionStoreError,
    check_step,
    normalize_object,
    parse_ranks,
    resolve_target,
)
from quark_torch.checks import check_model, check_type, take_step
from quark_torch.failures import InstrumentationNotices, do_each
from quark_torch.layer_filter import is_left_in_evaluation, name_modules
from quark_torch.parameters.config import ParameterDiagnosticsConfig
from quark_torch.parameters.listing import (
    ListedParameter,
    ParameterList,
    list_optimizers,
    locate_parameters,
    may_change,
)
from quark_torch.parameters.measuring import (
    EarlyGradient,
    EarlyUpdate,
    GradientScale,
    MicroBatches,
    MissingUpdates,
    ParameterReading,
    measure_early_updates,
    measure_gradients,
    read_parameters,
)
from quark_torch.parameters.optimizer_steps import OptimizerSteps
from quark_torch.parameters.optimizers import (
    OptimizerFinder,
    OptimizerPace,
    describe_foreign,
    list_foreign,
)
from quark_torch.parameters.recording import (
    DistributionWriter,
    ParameterReadback,
    SummaryWriter,
    merge_metadata,
)

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_replicas(run: OpenRun) -> bool:
    """Whether other ranks of a launch write to the run as well."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    ranks = run.context.ranks
    if ranks is None or torch.distributed.get_world_size() < 2:
        return False
    return not parse_ranks(ranks, "ranks").is_one


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[str | None]:
    """A digest of each, the same for the same bits in whatever order they are added up.

    Called without gradients; each device is waited for once. None for what
    has no bits to be read.
    """
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        total = _add_up(tensor)
        if total is not None:
            sums.setdefault(tensor.device, []).append((place, total))
    out: list[str | None] = [None] * len(tensors)
    for found in sums.values():
        totals = torch.stack([total for _, total in found]).tolist()
        for (place, _), total in zip(found, totals, strict=True):
            out[place] = f"{total % 2**64:016x}"
    return out


def _add_up(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    # Adding whole numbers wraps around and knows no rounding.
    return plain.view(_WORDS[plain.element_size()]).sum(dtype=torch.int64)


Snapshot = tuple[tuple[ParameterSummaryRecord, ...], tuple[ParameterDistributionRecord, ...]]

_NOTHING: Snapshot = ((), ())
_INT64_MAX = 2**63 - 1
_LISTED_NAMES = 20


class ParameterDiagnostics(ParameterReadback):
    """Recorder of statistics of parameters, their gradients and their updates.

    Call `snapshot(step)` once per step, right after `optimizer.step()`. If the step is not due, it
    takes microseconds. Otherwise each parameter and gradient is read once. A tied parameter is
    recorded once, with `aliases` in its metadata.

    **Updates** are differences. Parameters are copied before the optimizer step that is expected to
    precede a due snapshot. The copies need as much memory as the selected parameters, until
    `close`. If no update is available, its fields are None and `update_missing` in the metadata
    gives the reason, such as `no_optimizer_step` or `step_not_foreseen`. Three such snapshots in a
    row are reported by an `updates_missing` event. If a GradScaler skipped the step, the update is
    0, with `skipped` in the metadata.

    Changes between the optimizer step and the snapshot, such as weight clipping, are not part of
    the update. They are marked with `changed_after_step`.

    **Gradients** are those at the snapshot: accumulated over micro-batches and unscaled.
    `accumulated` in the metadata is the number of micro-batches, if known. If the loop clears
    gradients before the snapshot, the first record has `gradient_missing`. Later gradients are read
    at the end of the optimizer step. `carried_over` marks gradients that were not cleared after the
    previous step.

    Further metadata: `evaluation_mode` marks optimizer steps in `eval()` mode of a model with
    dropout or batch normalization. With several recording ranks, `digest` is equal on ranks with
    equal parameters. For a sharded parameter (DTensor), statistics, shape and count are those of
    the local shard, with `scope` and `global_shape`.

    A failure is logged once as `instrumentation_failed`; strict mode raises it. Thread-safe, except
    during a backward pass of the same model. On a GPU, a due snapshot waits for the device.

    Attributes:
        finder: Detector of replaced optimizers and of a GradScaler.

    Args:
        session: A TrainingSession, or its RunContext.
        model: Model, wrapped or not. New and removed parameters are noticed at the next snapshot.
        optimizer: Optimizer, a sequence of them, or None. A wrapper such as SAM counts as one
            optimizer.
        config: Options. Defaults to `ParameterDiagnosticsConfig()`.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
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
        check_type(config, "config", ParameterDiagnosticsConfig)
        check_model(model)
        # One list, which changes where the optimizers do.
        optimizers = list(list_optimizers(optimizer))
        self._run = run = resolve_target(session)
        self._config = config
        self._model = model
        self._optimizers = optimizers
        self._notices = InstrumentationNotices(run, "ParameterDiagnostics")
        self._closed = False
        self._parameters = ParameterList(model, config)
        self._listed: list[ListedParameter] | None = None
        self._early: dict[int, EarlyGradient] = {}
        self._early_updates: dict[int, EarlyUpdate] = {}
        self._clears_gradients = self._changes_weights = False
        self._in_evaluation = False
        self._scale = GradientScale(config.grad_scaler, optimizers)
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
        self._micro_batches = MicroBatches(
            optimizers, self._parameters, self._notices.fail, self._steps.find_steps
        )
        self.finder = OptimizerFinder(
            model,
            optimizers,
            self._take_up,
            self._take_scaler if config.grad_scaler is None else None,
        )
        self._missing = MissingUpdates(self._notices)
        self._summaries = SummaryWriter(session, batch_size=config.batch_size)
        self._distributions = DistributionWriter(session, batch_size=config.batch_size)
        try:
            self._check_what_is_given()
            self._steps.attach()
            self.finder.attach()
            self._micro_batches.begin()
        except Exception:
            # The run counts its writers.
            self.close()
            raise

    @property
    def config(self) -> ParameterDiagnosticsConfig:
        """The options."""
        return self._config

    @property
    def optimizer(self) -> Any:
        """Followed optimizers, as a tuple; assign new ones if they are replaced.

        A new optimizer is also detected at its first step, unless that step is compiled.

        Raises:
            SchemaValidationError: The assigned value is not an optimizer.
        """
        return tuple(self._optimizers)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.finder.name(list_optimizers(optimizer))
        self._tell_of_foreign()

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last call of `snapshot`."""
        return any(self._steps.has_stepped(index) for index in range(len(self._optimizers)))

    @property
    def step_totals(self) -> Sequence[int]:
        """Number of steps of each optimizer; empty if one cannot be followed."""
        return self._steps.totals

    @property
    def kept_bytes(self) -> int:
        """Memory used by copies of parameters, in bytes."""
        return self._steps.kept_bytes

    def snapshot(
        self, step: int, *, epoch: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Snapshot:
        """Record each selected parameter, if the step is due.

        Args:
            step: Step; it may decrease.
            epoch: Epoch, or None.
            metadata: JSON values for each record; copied. They override Quark's keys.

        Returns:
            The statistics and the histograms; both empty if the step is not due.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: This object is closed or the run has ended.
        """
        step, epoch = self._check(step, epoch)
        if not self._config.schedule.is_due(step):
            self._foresee(step)
            return _NOTHING
        own = normalize_object(metadata, "metadata") or None
        if torch.compiler.is_compiling():
            return _NOTHING
        try:
            return self._record(step, epoch, own)
        finally:
            self._foresee(step)

    def keep_pace(
        self,
        pace: OptimizerPace,
        step: int,
        *,
        epoch: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Record as `snapshot` does, in a loop with gradient accumulation.

        Args:
            pace: Object that decides whether the step is due, instead of the schedule.
            step, epoch, metadata: See `snapshot`.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            InvalidRunStateError: This object is closed or the run has ended.
        """
        step, epoch = self._check(step, epoch)
        was_waiting = pace.is_waiting
        try:
            if not pace.end(step, self._steps.totals, self._has_skipped):
                return _NOTHING
            own = normalize_object(metadata, "metadata") or None
            return self._record(step, epoch, own)
        finally:
            is_soon = pace.is_soon
            if is_soon and not (was_waiting and pace.is_waiting):
                self._note_scale()
            self._steps.prepare(copying=is_soon, is_waiting=pace.is_waiting)
            self._count(is_wanted=is_soon)

    def flush(self) -> Snapshot:
        """Deliver all accepted records of this run to the primary store.

        Returns:
            This object's records since the last flush, or since `batch_size` of a kind was last
            reached. Empty if nothing is stored.

        Raises:
            SessionStoreError: The store did not answer in time. The records stay queued and are
                delivered later.
        """
        return self._summaries.flush(), self._distributions.flush()

    def close(self) -> None:
        """Detach from the optimizers, free the copies and accept no more snapshots.

        Reading still works. A second call does nothing.

        Raises:
            SessionStoreError: In strict mode, the primary store's first delivery error.
        """
        if self._closed:
            return
        self._closed = True
        failure = do_each(
            self.finder.detach,
            self._micro_batches.end,
            self._steps.close,
            self._parameters.forget,
            self._early.clear,
            self._early_updates.clear,
            self._close_writers,
        )
        self._listed = None
        if isinstance(failure, SessionStoreError):
            raise failure
        if failure is not None:
            self._notices.fail("close", failure)

    def _close_writers(self) -> None:
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

    def _check(self, step: int, epoch: int | None) -> tuple[int, int | None]:
        if self._closed or self._run.refusal is not None:
            self._check_open("snapshot")
        if type(step) is not int or step < 0 or step > _INT64_MAX:
            step = take_step(self._run, step)
        if epoch is not None and (type(epoch) is not int or epoch < 0 or epoch > _INT64_MAX):
            epoch = check_step(epoch, "epoch")
        return step, epoch

    def _record(self, step: int, epoch: int | None, own: JsonObject | None) -> Snapshot:
        with self._summaries.lock:
            try:
                return self._take(step, epoch, own)
            except Exception as error:  # noqa: BLE001 - training must go on
                self._notices.fail("snapshot_failed", error, step=step)
                return _NOTHING
            finally:
                self._listed = None
                self._in_evaluation = False
                self._early.clear()
                self._early_updates.clear()

    def _take(self, step: int, epoch: int | None, own: JsonObject | None) -> Snapshot:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._notices.warn(
                "cuda_graph_capture",
                "snapshot() was called during the capture of a CUDA graph and did nothing",
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
                self._early_updates,
                self._find_scale,
                self._was_skipped,
                self._micro_batches.find,
                self._micro_batches.find_carried,
            )
            self._note_surroundings(readings)
        self._scale.note()
        if config.captures_updates:
            self._missing.note(step, readings, self._optimizers)
        if any(reading.is_cleared for reading in readings):
            self._clears_gradients = True
        if any("changed_after_step" in reading.metadata for reading in readings):
            self._changes_weights = True
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

    def _note_surroundings(self, readings: Sequence[ParameterReading]) -> None:
        """Say in which mode the step was made, and what replicas are compared by."""
        if self._in_evaluation:
            for reading in readings:
                reading.metadata["evaluation_mode"] = True
        if has_replicas(self._run):
            whole = [reading for reading in readings if "scope" not in reading.metadata]
            digests = digest_tensors([reading.local for reading in whole])
            for reading, digest in zip(whole, digests, strict=True):
                if digest is not None:
                    reading.metadata["digest"] = digest

    def _foresee(self, step: int) -> None:
        self._count(is_wanted=self._steps.foresee(step))

    def _count(self, *, is_wanted: bool) -> None:
        if is_wanted:
            self.finder.look_again()
            self._micro_batches.begin()
        else:
            self._micro_batches.end()

    def _has_skipped(self) -> bool:
        """Whether a GradScaler left a step out that was looked forward to."""
        try:
            return self._scale.has_fallen
        except Exception as error:  # noqa: BLE001 - training must go on
            self._notices.fail("scale_unread", error)
            return False

    def _note_scale(self) -> None:
        try:
            self._scale.note()
        except Exception as error:  # noqa: BLE001 - training must go on
            self._notices.fail("scale_unread", error)

    def _take_up(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Other optimizers are followed from now on."""
        with self._summaries.lock:
            before = ", ".join(type(one).__name__ for one in self._optimizers) or "none"
            self._optimizers[:] = optimizers
            self._steps.follow(optimizers)
            self._listed = None
        now = ", ".join(type(one).__name__ for one in optimizers) or "none"
        self._notices.warn(
            "optimizers_changed",
            f"the model has other optimizers now: {now}, before: {before}",
            severity="info",
        )

    def _take_scaler(self, scaler: Any) -> None:
        try:
            self._scale.follow(scaler)
        except Exception as error:  # noqa: BLE001 - the user's step must go on
            self._notices.fail("scale_unread", error)

    def _choose(self, optimizer_index: int) -> Sequence[torch.Tensor]:
        """The parameters to copy before an optimizer's step."""
        if self._listed is None:
            self._listed = self._parameters.find()
            self._places = locate_parameters(self._optimizers)
        return [
            listed.parameter
            for listed in self._listed
            if may_change(listed.parameter)
            and (place := self._places.get(id(listed.parameter))) is not None
            and place.optimizer_index == optimizer_index
        ]

    def _measure_early(self, optimizer_index: int) -> None:
        """Read at the end of a step what a loop changes before the snapshot."""
        self._in_evaluation |= is_left_in_evaluation(
            next(place.module for place in name_modules(self._model))
        )
        if not (self._clears_gradients or self._changes_weights):
            return
        chosen = self._choose(optimizer_index)
        with torch.no_grad():
            if self._clears_gradients:
                self._early.update(measure_gradients(chosen, self._config))
            if self._changes_weights:
                self._early_updates.update(
                    measure_early_updates(chosen, self._steps, optimizer_index, self._config)
                )

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
                "ParameterDiagnostics records nothing: its parameter patterns and roles match "
                f"none of the model's {len(identities)} parameters",
            )
        self._tell_of_foreign()

    def _tell_of_foreign(self) -> None:
        for index, optimizer in list_foreign(self._model, self._optimizers):
            self._notices.warn(
                "optimizer_of_another_model", describe_foreign(index, optimizer), key=index
            )

    def _check_open(self, call: str) -> None:
        if self._run.refusal is not None:
            self._run.refuse(call)
        raise InvalidRunStateError(f"{call}: this ParameterDiagnostics is closed")
