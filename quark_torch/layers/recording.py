"""The step trace that hooks share, and the part of HookEngine that makes records of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import time_ns
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from quark_core.api import (
    BufferedWriter,
    JsonObject,
    LayerSummaryRecord,
    Query,
    ReadBounds,
    cut_text,
    normalize_object,
    spell_out,
)
from quark_torch.checks import check_names
from quark_torch.measuring.device_probe import wait_for_probes
from quark_torch.measuring.tensor_reading import read_result
from quark_torch.measuring.tensor_statistics import TensorStatistics, Wanted

Modes = tuple[tuple[int, bool], ...]
"""Steps of evaluations, and whether a module was in training mode there; the newest last."""

_SETTLE_TIMEOUT_S = 5.0
_SCOPE = "scope: "
_MESSAGE_LENGTH = 500
_NAMED = 8
MAX_LISTED = 200
"""Names of modules in the payload of an event."""

GradientScale = Callable[[], float | None]

_log = logging.getLogger("quark")


class Failure(NamedTuple):
    """What switched a module off."""

    where: str
    module: str
    error: Exception
    step: int


def list_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    few = ", ".join(names[:_NAMED])
    return few if len(names) <= _NAMED else f"{few} and {len(names) - _NAMED} more"


class StepScale:
    """The scale of the gradients of one probed step, which may be learned late in it.

    Attributes:
        source: What tells the scale, or None while none is known.
    """

    __slots__ = ("source",)

    def __init__(self, source: GradientScale | None) -> None:
        self.source = source

    def __call__(self) -> float | None:
        """The scale, or None where there is none."""
        return None if self.source is None else self.source()


def _read_clock() -> int:
    return time_ns() // 1000


@dataclass(slots=True, eq=False)
class LayerReading:
    """One tensor of one call of a module, until its statistics are known.

    Attributes:
        recording: Who makes the record.
        module: Name, class and other names of the module.
        direction: forward for an activation, backward for a gradient.
        moment: Step and epoch.
        call_index: The module's call in its step.
        shape: Of the tensor.
        path: Where it is in the output, or None where it is the output.
        micro_batch: How many backward passes of the step came before the call.
        backward_index: How many earlier ones went through the same call.
        scale: What tells the scale of the gradients, or None.
        time_us: When it was read.
        scope: Which part of the whole it is, where it is a part that does not say so itself.
    """

    recording: LayerRecording
    module: tuple[str, str, tuple[str, ...]]
    direction: Literal["forward", "backward"]
    moment: tuple[int, int | None]
    call_index: int
    shape: tuple[int, ...] | None
    path: str | None = None
    micro_batch: int = 0
    backward_index: int = 0
    scale: GradientScale | None = None
    time_us: int = field(default_factory=_read_clock)
    scope: str | None = None

    def __call__(self, statistics: TensorStatistics) -> None:
        """Make the record; from the training thread or a background one."""
        self.recording._put(self, statistics)


class LayerRecording(BufferedWriter[LayerSummaryRecord]):
    """Puts layer summaries into the stream.

    Attributes:
        outside: Names of modules that no optimizer has.
        evaluations: Probed step -> module -> the steps before it at which the
            module was seen in an evaluation, and whether in training mode.
    """

    KIND: ClassVar[str] = LayerSummaryRecord.KIND

    def __init__(self, session: object, *, batch_size: int) -> None:
        self._told: set[object] = set()
        self._failures: list[Failure] = []
        self._unread: dict[str, str] = {}
        self._told_unread: set[str] = set()
        self.outside: frozenset[str] = frozenset()
        self.evaluations: dict[int, dict[str, Modes]] = {}
        super().__init__(session, batch_size=batch_size)

    def bind(self) -> None:
        """Connect to the run's stream."""
        super().bind()
        origin = self._run.origin
        self._origin = (origin.run_id, origin.writer_id, origin.attempt, origin.rank)
        self._take_sequence = self._channel.take_sequence

    def flush(self) -> tuple[LayerSummaryRecord, ...]:
        """Wait for pending measurements, and deliver all records to the primary store.

        Raises:
            SessionStoreError: The store did not answer in time.
        """
        self.settle()
        return super().flush()

    @spell_out(ReadBounds, before="limit")
    def read(
        self,
        *,
        module_name: str | None = None,
        module_type: str | None = None,
        summary_type: str | None = None,
        hook_direction: str | None = None,
        limit: int | None = None,
        **bounds: Unpack[ReadBounds],
    ) -> tuple[LayerSummaryRecord, ...]:
        """Flush, then read the run's layer statistics in order of storage.

        Args:
            module_name, module_type: Name or class of the modules.
            summary_type: `activation` or `gradient`.
            hook_direction: `forward` or `backward`.
            step, step_min, step_max: Bounds on the step, inclusive.
            epoch, epoch_min, epoch_max: Bounds on the epoch, inclusive.
            limit: Maximum number of records; the newest are kept. Defaults to all.

        Raises:
            SchemaValidationError: A bound is not a non-negative integer, or a name is not a str.
            SessionStoreError: The store cannot be read.
        """
        equals = {
            "module_name": module_name,
            "module_type": module_type,
            "summary_type": summary_type,
            "hook_direction": hook_direction,
        }
        check_names(**equals)
        self.settle()
        query = Query.build(
            equals=equals,
            **bounds,
            limit=limit,
        )
        return self._run.read(self.KIND, query).to_records()  # type: ignore[return-value]

    def settle(self) -> None:
        """Record what a device is still working out; waits for five seconds at most."""
        wait_for_probes(_SETTLE_TIMEOUT_S)

    def _put(self, reading: LayerReading, found: TensorStatistics) -> None:
        if self._run.is_over:
            return
        scale = None if reading.scale is None else reading.scale()
        if scale is not None and scale not in (0.0, 1.0):
            found = found.divide(scale)
        read = found.finite_count + found.nan_count + found.inf_count
        name, module_type, aliases = reading.module
        step, epoch = reading.moment
        is_forward = reading.direction == "forward"
        units = found.unit_count
        record = LayerSummaryRecord(
            *self._origin,
            self._take_sequence(),
            reading.time_us,
            name,
            module_type,
            "activation" if is_forward else "gradient",
            reading.direction,
            reading.call_index,
            found.element_count,
            step,
            epoch,
            reading.shape,
            found.mean,
            found.std,
            found.norm,
            found.variance,
            _share(found.dead_unit_count, units) if units else None,
            _share(found.saturated_count, read),
            _make_metadata(
                reading.path,
                aliases,
                reading.micro_batch,
                reading.backward_index,
                scale,
                found.notes,
                found.density,
                name in self.outside,
                reading.scope,
                self.evaluations[step].get(name) if step in self.evaluations else None,
            ),
            found.minimum,
            found.maximum,
            _share(found.near_zero_count, read),
            found.nan_count,
            found.inf_count,
            found.sample_variation,
        )
        record = self._put_record(record)
        self._remember(record, 1)

    def _tell(
        self,
        event_type: str,
        severity: str,
        message: str,
        *,
        key: object = None,
        step: int | None = None,
        **payload: Any,
    ) -> None:
        """Say something once: in the run's events and in the log."""
        key = event_type if key is None else key
        if key in self._told:
            return
        self._told.add(key)
        run = self._run
        if severity != "info":
            _log.warning("run %s: %s", run.context.run_id, message)
        if not run.is_over:
            body = {
                "component": "HookEngine",
                "message": cut_text(message, _MESSAGE_LENGTH),
                **payload,
            }
            told = normalize_object(body, "payload")
            run.emit_event(event_type, severity, step=step, payload=told)

    def _tell_failure(self, where: str, error: BaseException) -> None:
        """Say once for each reason that a part of the instrumentation has failed."""
        reason = _describe_error(error)
        self._tell(
            "instrumentation_failed",
            "error",
            f"{where} failed and is switched off; training continues: {reason}",
            key=("instrumentation_failed", where, type(error)),
            where=where,
            module=None,
            reason=reason,
        )

    def _note_failure(self, failure: Failure) -> None:
        """Have it said that a module was switched off, with those that fail alike in the step."""
        self._failures.append(failure)

    def _note_unread(self, module: str, reason: str) -> None:
        """Have it said that a tensor of a module could not be read."""
        self._unread.setdefault(module, reason)

    def _tell_unread(self, step: int) -> None:
        """Say which modules gave what could not be read, each once."""
        if not self._unread:
            return
        unread, self._unread = self._unread, {}
        names = [name for name in unread if name not in self._told_unread]
        if not names:
            return
        self._told_unread.update(names)
        reason = cut_text(unread[names[0]], _MESSAGE_LENGTH)
        self._tell(
            "outputs_unread",
            "warning",
            f"{list_names(names)} returned tensors that cannot be read, so they have no "
            f"summaries: {reason}",
            key=("outputs_unread", *names),
            step=step,
            modules=names[:MAX_LISTED],
            module_count=len(names),
            reason=reason,
        )

    def _tell_failures(self) -> None:
        """Say which modules were switched off: once for each reason, naming all of them."""
        if not self._failures:
            return
        failures, self._failures = self._failures, []
        alike: dict[tuple[str, type], list[Failure]] = {}
        for failure in failures:
            alike.setdefault((failure.where, type(failure.error)), []).append(failure)
        for (where, _), same in alike.items():
            names = list(dict.fromkeys(failure.module for failure in same))
            reason = _describe_error(same[0].error)
            self._tell(
                "instrumentation_failed",
                "error",
                f"{where} of {list_names(names)} failed and is switched off; training "
                f"continues: {reason}",
                key=("instrumentation_failed", where, *names),
                step=same[0].step,
                where=where,
                module=names[0],
                modules=names[:MAX_LISTED],
                module_count=len(names),
                reason=reason,
            )


def read_gradient_scale(scaler: Any) -> GradientScale | None:
    """What gives the scale that a scaler has now, later and without waiting for a device now."""
    if scaler is None:
        return None
    held = getattr(scaler, "_scale", None)
    if isinstance(held, Tensor) and held.device.type != "cpu" and scaler.is_enabled():
        with torch.no_grad():
            return _HeldScale(held.detach().clone())
    value = float(scaler.get_scale() if hasattr(scaler, "get_scale") else scaler())
    return lambda: value


class _HeldScale:
    """A scale on a device, fetched when it is first asked for: in the background."""

    def __init__(self, held: Tensor) -> None:
        self._held = held
        self._value: float | None = None

    def __call__(self) -> float:
        if self._value is None:
            self._value = float(self._held)
        return self._value


def _describe_error(error: BaseException) -> str:
    return cut_text(f"{type(error).__name__}: {error}", _MESSAGE_LENGTH)


@lru_cache(maxsize=1024)
def _make_metadata(
    path: str | None,
    aliases: tuple[str, ...],
    micro_batch: int,
    backward_index: int,
    scale: float | None,
    notes: tuple[str, ...],
    density: float | None,
    is_outside: bool,
    scope: str | None,
    evaluations: Modes | None,
) -> JsonObject | None:
    items: dict[str, Any] = {}
    if path is not None:
        items["output_path"] = path
    if micro_batch:
        items["micro_batch"] = micro_batch
    if backward_index:
        items["backward_index"] = backward_index
    if scale is not None:
        items["grad_scale"] = scale
    scopes = [note.removeprefix(_SCOPE) for note in notes if note.startswith(_SCOPE)]
    if scopes or scope is not None:
        items["scope"] = scopes[0] if scopes else scope
    if aliases:
        items["aliases"] = list(aliases)
    if is_outside:
        items["in_optimizer"] = False
    if density is not None:
        items["density"] = density
    if evaluations:
        *earlier, (step, is_training) = evaluations
        items["evaluation"] = {"step": step, "training": is_training}
        if earlier:
            items["evaluation"]["earlier"] = [list(each) for each in earlier]
    others = [note for note in notes if not note.startswith(_SCOPE)]
    if others:
        items["notes"] = others
    return JsonObject(items) if items else None


def _share(count: int | None, total: int | None) -> float | None:
    return None if count is None or not total else count / total


OF_GRADIENTS = Wanted(near_zero=0.0)


@dataclass(slots=True, eq=False)
class PlainTape:
    """Counters of a probed step, as the compiled tape has them too.

    Attributes:
        is_open: Whether hooks still take anything.
        spent_ns: Time that the hooks took.
        calls: Calls of modules that were seen.
        saw_backward: Whether gradients came since the last forward.
        micro_batch: How many backward passes came before this forward.
        evaluations: Calls that were left out, because they are no training.
        surplus: Calls that were left out, because their module had too many.
        late: Gradients that came after the step.
    """

    is_open: bool = True
    spent_ns: int = 0
    calls: int = 0
    saw_backward: bool = False
    micro_batch: int = 0
    evaluations: int = 0
    surplus: int = 0
    late: int = 0

    def close(self) -> None:
        """Take no more."""
        self.is_open = False


class TapeReading:
    """Makes the records of what compiled hooks have read, after the step."""

    __slots__ = ("_moment", "_recording", "_scale", "tape")

    def __init__(
        self, recording: LayerRecording, moment: tuple[int, int | None], scale: GradientScale
    ) -> None:
        self._recording = recording
        self._moment = moment
        self._scale = scale
        self.tape: Any = None

    def __call__(self, number: int) -> None:
        """Make the record of a row of the tape."""
        (
            site,
            is_forward,
            call_index,
            micro_batch,
            backward_index,
            time_us,
            shape,
            element_count,
            units,
            result,
        ) = self.tape.read(number)
        wanted = OF_GRADIENTS
        if is_forward:
            # Of the units it matters only whether they were wanted.
            wanted = Wanted(site.near_zero, site.saturation)
        found = read_result(result, element_count, None if units < 0 else units, wanted)
        if found is None:
            return
        reading = LayerReading(
            self._recording,
            site.identity,
            "forward" if is_forward else "backward",
            self._moment,
            call_index,
            shape,
            None,
            micro_batch,
            backward_index,
            None if is_forward else self._scale,
            time_us,
        )
        self._recording._put(reading, found)


_is_compiling = torch.compiler.is_compiling


class InertHook:
    """What a copy or a pickle of a model has in the place of a hook; does nothing."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""


class InertWhenCopied:
    """A hook that belongs to one module: a copy or a pickle of the model has an inert one."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


@functools.cache
def make_hook_types(hooks: Any) -> tuple[Any, Any]:
    """As `ForwardHook` and `GradientHook` of `probes`, which ask compiled code first.

    They are Python's all the same, since dynamo has to see what they do: nothing.
    """

    class TapedForwardHook(InertWhenCopied, hooks.Call):  # type: ignore[misc]
        __slots__ = ()

        def __call__(self, module: nn.Module, _args: object, output: object) -> None:
            if _is_compiling():
                return
            try:
                if self.take(module, output):
                    return
            except Exception as error:  # noqa: BLE001 - it must not reach the user's forward
                self.probed.fail(self.site, "forward hook", error)
                return
            self.probed.see_output(self.site, module, output)

    class TapedGradientHook(InertWhenCopied, hooks.Gradient):  # type: ignore[misc]
        __slots__ = ()

        def __call__(self, gradient: Tensor) -> None:
            if _is_compiling():
                return
            try:
                if self.take(gradient):
                    return
            except Exception as error:  # noqa: BLE001 - it must not reach the user's backward
                self.probed.fail(self.site, "gradient hook", error)
                return
            self.probed.see_gradient(
                self.site, gradient, self.call_index, None, self.micro_batch, self.count_firing()
            )

    return TapedForwardHook, TapedGradientHook
