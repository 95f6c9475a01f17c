"""Measures parameters, their gradients and last updates, and tells where updates are missing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd, isfinite
from typing import Any

import torch

from quark_torch.failures import InstrumentationNotices
from quark_torch.measuring.measures import (
    Histogram,
    measure_histogram,
    measure_many,
    measure_updates,
)
from quark_torch.measuring.tensor_reading import memory_order
from quark_torch.measuring.tensor_statistics import TensorStatistics, Wanted
from quark_torch.parameters.config import ParameterDiagnosticsConfig
from quark_torch.parameters.listing import (
    ListedParameter,
    OptimizerPlace,
    ParameterList,
    may_change,
    take_local,
)
from quark_torch.parameters.optimizer_steps import OptimizerSteps, find_version

_SAMPLED = 256
_MORE_WATCHED = 3  # parameters of an optimizer, from its first on, beside the one that counts


class _Count:
    """Called when a gradient has come to one parameter; holds it only weakly.

    Autograd adds in place to a gradient that is there, which its version
    tells from one that is new: one that an optimizer's step has used and that
    is added to all the same was not cleared. What else changes gradients in place makes the
    number unknown, except where it comes before the first one, when it is
    taken for `zero_grad(set_to_none=False)`.
    """

    __slots__ = (
        "_handle", "_is_carried", "_is_first", "_is_used", "_parameter", "_total", "_used",
        "_version", "number",
    )  # fmt: skip

    def __init__(self, parameter: torch.Tensor, total: int | None, *, has_stepped: bool) -> None:
        self.number: int | None = None
        # Whether the gradient that is there was used by a step, and then added to.
        self._is_used = self._is_carried = False
        self._used: torch.Tensor | None = None
        self._total: int | None = None
        self._version = -1
        self._parameter = weakref.ref(parameter)
        self._handle: Any = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self
        )
        self.begin(total, has_stepped=has_stepped)

    def begin(self, total: int | None, *, has_stepped: bool) -> None:
        """Another step begins: go on from the gradient that is there.

        Args:
            total: How many steps the optimizer has made; None where it is not known.
            has_stepped: Whether it made one in the loop's step that has ended.
        """
        self._is_first = True
        is_news = self._total is None or total != self._total
        self._total = total
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self.number, self._version = 0, -1
            self._forget_used()
        elif gradient.is_inference():
            self.number = None
        else:
            # It may have been clipped since the last one came, or set to zero.
            if gradient._version != self._version:
                self.number = None
            self._version = gradient._version
            if has_stepped and is_news and gradient.layout is torch.strided:
                self._is_used = True
                # It may have been set to zero, which a look at it would wait for a device to say.
                self._used = _take_sample(gradient)

    @property
    def is_carried_over(self) -> bool:
        """Whether the gradient still holds what a step of the optimizer has used; waits for it."""
        used = self._used
        return self._is_carried and used is not None and bool(used.any())

    def _forget_used(self) -> None:
        self._is_used = self._is_carried = False
        self._used = None

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient, is_first = parameter.grad, self._is_first
        self._is_first = False
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            self.number = None
            self._forget_used()
            return
        version, known = gradient._version, self._version
        self._version = version
        if version <= known:
            self.number = 1
            self._forget_used()
        elif version == known + 1:
            self.number = None if self.number is None else self.number + 1
            self._is_carried |= self._is_used
        else:
            self.number = 1 if is_first else None
            self._forget_used()

    @property
    def identity(self) -> int:
        """The `id` of its parameter; -1 where that is gone."""
        parameter = self._parameter()
        return -1 if parameter is None else id(parameter)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it counts by this parameter."""
        return self._parameter() is parameter

    def remove(self) -> None:
        """Take the hook off the parameter."""
        self._handle.remove()


class MicroBatches:
    """Counts the backward passes of a step by one parameter of each optimizer.

    A few more of each, from its first parameter on, tell of gradients that are cleared in a part
    of the model only. The hooks are there only while they are wanted.

    Args:
        optimizers: The optimizers, as they are when it is looked; without one the index is -1.
        parameters: The model's.
        on_failure: Told of an exception, with the name of what went wrong.
        find_steps: Of an optimizer's index, how many steps it has made (None where that is
            not known), and whether one of them in the loop's step that has ended.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: ParameterList,
        on_failure: Callable[[str, Exception], None],
        find_steps: Callable[[int], tuple[int | None, bool]],
    ) -> None:
        self._optimizers = optimizers
        self._find_steps = find_steps
        self._parameters = parameters
        self._on_failure = on_failure
        # By optimizer and place: the one that counts has place 0.
        self._counts: dict[tuple[int, int], _Count] = {}

    def begin(self) -> None:
        """Count from now on."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - training must go on
            self.end()
            self._on_failure("micro_batches_uncounted", error)

    def _begin(self) -> None:
        chosen: dict[tuple[int, int], torch.Tensor] = {}
        held_by = {
            index: [each for group in optimizer.param_groups for each in group["params"]]
            for index, optimizer in enumerate(self._optimizers)
        } or {-1: [listed.parameter for listed in self._parameters.known]}
        for index, held in held_by.items():
            known = [each for each in held if index < 0 or self._parameters.has(each)]
            chosen |= {(index, place): each for place, each in enumerate(_choose(known))}
        for key in self._counts.keys() - chosen.keys():
            self._counts.pop(key).remove()
        paces = {index: self._find_steps(index) for index in held_by}
        for key, parameter in chosen.items():
            count = self._counts.get(key)
            total, has_stepped = paces[key[0]]
            if count is not None and count.is_of(parameter):
                count.begin(total, has_stepped=has_stepped)
                continue
            if count is not None:
                self._counts.pop(key).remove()
            self._counts[key] = _Count(parameter, total, has_stepped=has_stepped)

    def end(self) -> None:
        """Count no more."""
        if self._counts:
            for count in self._counts.values():
                count.remove()
            self._counts.clear()

    def find_carried(self, index: int) -> frozenset[int] | None:
        """Which gradients of an optimizer still hold what an earlier step of it has used.

        Returns:
            The `id` of each such parameter among those that are watched; None for all
            parameters of the optimizer, where the one that counts is among them.
        """
        main = self._counts.get((index, 0))
        if main is not None and main.is_carried_over:
            return None
        watched = [count for (owner, _), count in self._counts.items() if owner == index]
        return frozenset(
            count.identity for count in watched if count is not main and count.is_carried_over
        )

    def find(self, index: int) -> int | None:
        """How many micro-batches an optimizer's gradients sum up; None where it is not known."""
        count = self._counts.get((index, 0))
        return None if count is None or not count.number else count.number


def _choose(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The trained ones to watch, the one that counts first; none where nothing is trained.

    That is the last one: what is near the loss gets a gradient once in a backward pass.
    """
    trained = [each for each in parameters if each.requires_grad and each.is_leaf]
    if not trained:
        return []
    backwards = reversed(trained)
    main = next((each for each in backwards if each.grad is not None), trained[-1])
    places = [len(trained) * part // _MORE_WATCHED for part in range(_MORE_WATCHED)]
    others = {id(trained[place]): trained[place] for place in places}
    return [main, *(each for each in others.values() if each is not main)]


class GradientScale:
    """Follows a GradScaler from one snapshot to the next.

    Args:
        scaler: A GradScaler, a function that returns its scale, or None.
        optimizers: The optimizers, as they are when it is looked.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.follow(scaler)

    def follow(self, scaler: Any) -> None:
        """Take this scaler from now on."""
        self._scaler = scaler
        self._get: Callable[[], Any] | None = None
        if scaler is not None:
            self._get = getattr(scaler, "get_scale", scaler)
        self._last = self._read()

    @property
    def has_fallen(self) -> bool:
        """Whether the scale is lower than at the last snapshot: a step was left out."""
        return self._get is not None and self._read() < self._last

    def note(self) -> None:
        """A snapshot was taken."""
        self._last = self._read()

    def find(self, optimizer_index: int, *, stepped: bool) -> float:
        """By what the gradients of an optimizer are multiplied now; 1.0 where they are not.

        A GradScaler divides them before the optimizer's step, or when it is
        told to; a step that it left out lowers its scale.
        """
        if self._get is None or stepped or self.has_fallen:
            return 1.0
        states = getattr(self._scaler, "_per_optimizer_states", None)
        if states is not None:
            # Asked with get(), because the mapping makes what it does not have.
            state = states.get(id(self._optimizers[optimizer_index]))
            if state is not None and getattr(state.get("stage"), "name", "READY") != "READY":
                return 1.0
        scale = self._read()
        return scale if isfinite(scale) and scale > 0 else 1.0

    def _read(self) -> float:
        return 1.0 if self._get is None else float(self._get())


def _take_sample(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of some elements of a gradient, evenly spaced."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone()


@dataclass(frozen=True, slots=True)
class EarlyGradient:
    """A gradient as its optimizer's step left it, for loops that clear it at once."""

    statistics: TensorStatistics | None
    histogram: Histogram | None


@dataclass(frozen=True, slots=True)
class EarlyUpdate:
    """An update as it was when its step had ended, for loops that change weights themselves."""

    statistics: TensorStatistics | None
    before_norm: float | None
    histogram: Histogram | None


@dataclass(slots=True)
class ParameterReading:
    """What a snapshot found of one parameter.

    Attributes:
        listed: The parameter.
        place: Where its optimizer keeps it, or None.
        local: What this process holds of it.
        value, gradient, update: Their statistics, or None.
        before_norm: Norm of the parameter before the update.
        is_cleared: Whether there was a gradient that is gone, or zeroed, by now.
        histograms: By type of distribution.
        metadata: What a reader must know.
    """

    listed: ListedParameter
    place: OptimizerPlace | None
    local: torch.Tensor
    value: TensorStatistics | None = None
    gradient: TensorStatistics | None = None
    update: TensorStatistics | None = None
    before_norm: float | None = None
    is_cleared: bool = False
    histograms: dict[str, Histogram] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def read_parameters(
    listed: Sequence[ListedParameter],
    places: dict[int, OptimizerPlace],
    steps: OptimizerSteps,
    config: ParameterDiagnosticsConfig,
    early: dict[int, EarlyGradient],
    early_updates: dict[int, EarlyUpdate],
    find_scale: Callable[[int], float],
    was_skipped: Callable[[Sequence[ParameterReading]], bool],
    find_accumulated: Callable[[int], int | None],
    find_carried: Callable[[int], frozenset[int] | None],
) -> list[ParameterReading]:
    """Read parameters once, as they are now. Called without gradients.

    Args:
        listed: The parameters.
        places: Where optimizers keep them, by the `id` of the parameter.
        steps: What optimizers have done.
        config: What is wanted.
        early: Gradients that were measured before they were cleared, by `id`.
        early_updates: Updates that were measured when the step had ended, by `id`.
        find_scale: By what the gradients of an optimizer (-1 for no
            optimizer) are still multiplied.
        was_skipped: Of the parameters of an optimizer that made no step,
            whether a GradScaler left it out.
        find_accumulated: How many micro-batches the gradients of an optimizer
            sum up, or None.
        find_carried: Which of them still hold what an earlier step has used, by `id`; None
            for all.
    """
    readings = []
    for entry in listed:
        local, scope = take_local(entry.parameter)
        reading = ParameterReading(entry, places.get(id(entry.parameter)), local)
        if scope is not None:
            reading.metadata["scope"] = scope
            reading.metadata["global_shape"] = list(entry.parameter.shape)
        if entry.aliases:
            reading.metadata["aliases"] = list(entry.aliases)
        readings.append(reading)
    by_optimizer: dict[int, list[ParameterReading]] = {}
    for reading in readings:
        index = -1 if reading.place is None else reading.place.optimizer_index
        by_optimizer.setdefault(index, []).append(reading)
    for index, group in by_optimizer.items():
        _read_gradients(group, steps, index, config, early, find_scale)
        _note_sums(group, find_accumulated(index), find_carried(index))
        if index < 0 or not config.captures_updates:
            continue
        missing = steps.explain_missing(index)
        if missing == "no_optimizer_step" and was_skipped(group):
            _note_skip(group, config)
        elif missing is not None:
            _note_missing(group, missing)
        else:
            _read_updates(group, steps, index, config, early_updates)
            updates = [reading.update for reading in group if reading.update is not None]
            # A fused optimizer is called all the same, and leaves out its step by itself.
            if all(update.norm == 0 for update in updates) and was_skipped(group):
                _note_skip(group, config)
    _read_values(readings, config)
    return readings


def _note_sums(
    group: Sequence[ParameterReading], accumulated: int | None, carried: frozenset[int] | None
) -> None:
    """Say what the gradients of an optimizer sum up."""
    for reading in group:
        if reading.gradient is None:
            continue
        if carried is None or id(reading.listed.parameter) in carried:
            reading.metadata["carried_over"] = True
        if accumulated is not None and accumulated > 1:
            reading.metadata["accumulated"] = accumulated


def measure_gradients(
    parameters: Sequence[torch.Tensor], config: ParameterDiagnosticsConfig
) -> dict[int, EarlyGradient]:
    """Measure gradients as they are, by the `id` of the parameter."""
    found = {
        id(parameter): take_local(gradient)[0]
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    }
    gradients = list(found.values())
    wanted = Wanted(near_zero=config.near_zero_epsilon)
    statistics: Sequence[TensorStatistics | None] = [None] * len(found)
    if config.capture_summaries:
        statistics = measure_many(gradients, wanted)
    histograms: list[Histogram | None] = [None] * len(found)
    if _wants(config, "gradient"):
        histograms = [_take_histogram(gradient, config) for gradient in gradients]
    return {
        identity: EarlyGradient(*pair)
        for identity, pair in zip(found, zip(statistics, histograms, strict=True), strict=True)
    }


def measure_early_updates(
    parameters: Sequence[torch.Tensor],
    steps: OptimizerSteps,
    index: int,
    config: ParameterDiagnosticsConfig,
) -> dict[int, EarlyUpdate]:
    """Measure what an optimizer's step has just done, by the `id` of the parameter."""
    befores: list[torch.Tensor] = []
    afters: list[torch.Tensor] = []
    identities = []
    for parameter in parameters:
        local = take_local(parameter)[0]
        before = steps.find_before(index, parameter, local)
        if before is not None:
            befores.append(before)
            afters.append(local)
            identities.append(id(parameter))
    found = measure_updates(befores, afters, Wanted(near_zero=config.near_zero_epsilon))
    histograms: list[Histogram | None] = [None] * len(found)
    if _wants(config, "update"):
        pairs = zip(befores, afters, strict=True)
        histograms = [_take_difference(before, after, config) for before, after in pairs]
    return {
        identity: EarlyUpdate(measured.update, measured.before_norm, histogram)
        for identity, measured, histogram in zip(identities, found, histograms, strict=True)
        if measured is not None
    }


def _read_gradients(
    group: Sequence[ParameterReading],
    steps: OptimizerSteps,
    index: int,
    config: ParameterDiagnosticsConfig,
    early: dict[int, EarlyGradient],
    find_scale: Callable[[int], float],
) -> None:
    gradients = {
        id(reading): take_local(gradient)[0]
        for reading in group
        if (gradient := reading.listed.parameter.grad) is not None
    }
    scale = find_scale(index) if gradients else 1.0
    found: dict[int, TensorStatistics | None] = {}
    # Also where only histograms are wanted: a gradient that was zeroed shows here.
    if config.capture_summaries or _wants(config, "gradient"):
        wanted = Wanted(near_zero=config.near_zero_epsilon * scale)
        measured = measure_many(list(gradients.values()), wanted)
        found = dict(zip(gradients, measured, strict=True))
    for reading in group:
        parameter = reading.listed.parameter
        statistics = found.get(id(reading))
        mark = None if index < 0 else steps.find_mark(index, parameter)
        gradient = gradients.get(id(reading))
        if mark is not None and _is_cleared(gradient, statistics, mark.version):
            reading.is_cleared = True
            known = early.get(id(parameter))
            if known is None:
                reading.metadata["gradient_missing"] = "cleared_before_snapshot"
                continue
            reading.gradient = known.statistics
            if known.histogram is not None:
                reading.histograms["gradient"] = known.histogram
            continue
        if gradient is None:
            continue
        if statistics is not None and scale != 1.0:
            statistics = statistics.divide(scale)
            reading.metadata["grad_scale"] = scale
        reading.gradient = statistics
        if statistics is not None and statistics.density is not None:
            reading.metadata["density"] = statistics.density
        if _wants(config, "gradient"):
            histogram = _take_histogram(gradient, config)
            if histogram is not None:
                edges = tuple(edge / scale for edge in histogram.edges)
                reading.histograms["gradient"] = histogram._replace(edges=edges)


def _is_cleared(
    gradient: torch.Tensor | None, statistics: TensorStatistics | None, version: int | None
) -> bool:
    """Whether a gradient that was there at the end of the step is gone or all zeros now."""
    if gradient is None:
        return True
    if statistics is None or version is None or find_version(gradient) == version:
        return False
    return statistics.minimum == 0.0 and statistics.maximum == 0.0 and statistics.finite_count > 0


def _read_updates(
    group: Sequence[ParameterReading],
    steps: OptimizerSteps,
    index: int,
    config: ParameterDiagnosticsConfig,
    early: dict[int, EarlyUpdate],
) -> None:
    """Read before and after together, which gives the value's statistics too."""
    changed = steps.find_changed(index)
    copied: list[tuple[ParameterReading, torch.Tensor]] = []
    for reading in group:
        parameter = reading.listed.parameter
        if not reading.local.numel():
            continue
        before = steps.find_before(index, parameter, reading.local)
        if before is None and not may_change(parameter):
            continue
        is_changed = id(parameter) in changed
        if is_changed:
            reading.metadata["changed_after_step"] = True
        known = early.get(id(parameter))
        if before is None:
            reading.metadata["update_missing"] = "not_copied"
        elif known is not None:
            reading.update, reading.before_norm = known.statistics, known.before_norm
            if known.histogram is not None:
                reading.histograms["update"] = known.histogram
        elif is_changed:
            reading.metadata["update_missing"] = "changed_after_step"
        else:
            copied.append((reading, before))
    if config.capture_summaries:
        measured = measure_updates(
            [before for _, before in copied],
            [reading.local for reading, _ in copied],
            Wanted(near_zero=config.near_zero_epsilon),
        )
        for (reading, _), found in zip(copied, measured, strict=True):
            if found is not None:
                reading.update, reading.value, reading.before_norm = found
            else:
                reading.metadata["update_missing"] = "cannot_be_measured"
    if _wants(config, "update"):
        for reading, before in copied:
            histogram = _take_difference(before, reading.local, config)
            if histogram is not None:
                reading.histograms["update"] = histogram


def _note_missing(group: Sequence[ParameterReading], reason: str) -> None:
    for reading in group:
        if may_change(reading.listed.parameter):
            reading.metadata["update_missing"] = reason


def _note_skip(group: Sequence[ParameterReading], config: ParameterDiagnosticsConfig) -> None:
    """The optimizer changed nothing, because its step was left out."""
    for reading in group:
        count = reading.local.numel()
        if not may_change(reading.listed.parameter) or not count:
            continue
        reading.metadata["skipped"] = True
        if config.capture_summaries:
            reading.update = TensorStatistics(count, count, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _read_values(readings: Sequence[ParameterReading], config: ParameterDiagnosticsConfig) -> None:
    if config.capture_summaries:
        unread = [reading for reading in readings if reading.value is None]
        wanted = Wanted(near_zero=config.near_zero_epsilon)
        measured = measure_many([reading.local for reading in unread], wanted)
        for reading, statistics in zip(unread, measured, strict=True):
            reading.value = statistics
            if "skipped" in reading.metadata and statistics is not None:
                reading.before_norm = statistics.norm
    for reading in readings:
        if reading.value is not None and reading.value.notes:
            reading.metadata["notes"] = list(reading.value.notes)
        if _wants(config, "value"):
            histogram = _take_histogram(reading.local, config)
            if histogram is not None:
                reading.histograms["value"] = histogram


def _wants(config: ParameterDiagnosticsConfig, distribution_type: str) -> bool:
    return config.capture_distributions and distribution_type in config.distribution_types


def _take_histogram(tensor: torch.Tensor, config: ParameterDiagnosticsConfig) -> Histogram | None:
    return measure_histogram(tensor, config.histogram_bins, config.max_histogram_values)


def _take_difference(
    before: torch.Tensor, after: torch.Tensor, config: ParameterDiagnosticsConfig
) -> Histogram | None:
    """A histogram of after less before, of a sample of both."""
    count = after.numel()
    if count > config.max_histogram_values:
        step = -(-count // config.max_histogram_values)
        # A step that shares a factor with a dimension would see only some columns.
        while any(gcd(step, size) > 1 for size in after.shape):
            step += 1
        order = memory_order(after)
        if order is not None and before.stride() == after.stride():
            before, after = (
                tensor.permute(order).reshape(-1)[::step] for tensor in (before, after)
            )
        else:
            places = torch.arange(0, count, step, device=after.device)
            index = torch.unravel_index(places, after.shape)
            before, after = before[index], after[index]
    wide = torch.complex128 if after.dtype.is_complex else torch.float64
    found = _take_histogram(after.to(wide) - before.to(wide), config)
    return None if found is None else found._replace(total_count=count)


_IN_A_ROW = 3
_REASONS = {
    "no_optimizer_step": "it does not step between snapshots. Another optimizer may have replaced "
    "it (set it with `watch.optimizer = …`), or snapshots are more frequent than its steps",
    "step_not_foreseen": "its steps are so irregular that the last one before a snapshot "
    "cannot be predicted",
    "optimizer_step_failed": "its step raises an exception",
    "optimizer_has_no_step_hooks": "its step accepts no hooks",
    "copy_failed": "its parameters could not be copied",
    "not_copied": "its parameters cannot be copied",
    "cannot_be_measured": "its parameters cannot be read",
    "in_no_optimizer": "no given optimizer has parameters of the model",
}


class MissingUpdates:
    """Counts, for each optimizer, the snapshots in a row in which no parameter has an update.

    Args:
        notices: Where the third one is told of, once for each reason.
    """

    def __init__(self, notices: InstrumentationNotices) -> None:
        self._notices = notices
        self._in_a_row: dict[int, int] = {}

    def note(
        self,
        step: int,
        readings: Sequence[ParameterReading],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """A snapshot was taken."""
        if not optimizers:
            return
        reasons: dict[int, list[str | None]] = {}
        for reading in readings:
            if reading.listed.parameter.requires_grad:
                index = -1 if reading.place is None else reading.place.optimizer_index
                reasons.setdefault(index, []).append(reading.metadata.get("update_missing"))
        if any(index >= 0 for index in reasons):
            # Some parameters are left out of the optimizers: the analyzer's business.
            reasons.pop(-1, None)
        for index, found in reasons.items():
            is_missing = index < 0 or None not in found
            self._in_a_row[index] = self._in_a_row.get(index, 0) + 1 if is_missing else 0
            if self._in_a_row[index] == _IN_A_ROW:
                self._tell(
                    step, (found[0] if index >= 0 else None) or "in_no_optimizer", index, optimizers
                )

    def _tell(
        self, step: int, reason: str, index: int, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        name = "the model" if index < 0 else type(optimizers[index]).__name__
        self._notices.warn(
            "updates_missing",
            f"{_IN_A_ROW} snapshots in a row have no update of the parameters of {name}: "
            f"{_REASONS.get(reason, reason)}",
            key=(index, reason),
            step=step,
            reason=reason,
            optimizer=None if index < 0 else name,
        )
