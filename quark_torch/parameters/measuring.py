"""Measures parameters, their gradients and last updates, and tells where updates are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch

from quark_torch.measuring.measures import measure_many, measure_updates
from quark_torch.measuring.partials import TensorStatistics, Wanted
from quark_torch.measuring.statistics import Histogram, measure_histogram
from quark_torch.measuring.tensor_forms import memory_order
from quark_torch.notices import InstrumentationNotices
from quark_torch.parameters.config import ParameterDiagnosticsConfig
from quark_torch.parameters.listing import ListedParameter, OptimizerPlace, may_change, take_local
from quark_torch.parameters.optimizer_steps import OptimizerSteps, find_version


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
        outcome = None if index < 0 or not config.captures_updates else steps.review(index)
        if outcome is not None and outcome.missing == "no_optimizer_step":
            if was_skipped(group):
                _note_skip(group, config)
            else:
                _note_missing(group, outcome.missing)
        elif outcome is not None and outcome.missing is not None:
            _note_missing(group, outcome.missing)
        elif outcome is not None:
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
            statistics = _divide(statistics, scale)
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


def _divide(statistics: TensorStatistics, scale: float) -> TensorStatistics:
    """Statistics of the tensor divided by a number above 0."""

    def shrink(value: float | None) -> float | None:
        return None if value is None else value / scale

    variance = statistics.variance
    return TensorStatistics(
        element_count=statistics.element_count,
        finite_count=statistics.finite_count,
        nan_count=statistics.nan_count,
        inf_count=statistics.inf_count,
        mean=shrink(statistics.mean),
        variance=None if variance is None else variance / scale / scale,
        norm=shrink(statistics.norm),
        minimum=shrink(statistics.minimum),
        maximum=shrink(statistics.maximum),
        near_zero_count=statistics.near_zero_count,
        density=statistics.density,
        notes=statistics.notes,
    )


_IN_A_ROW = 3
_REASONS = {
    "no_optimizer_step": "it makes no step between snapshots: another optimizer may have taken "
    "its place (`watch.optimizer = …` names it), or snapshots are taken more often than it steps",
    "step_not_foreseen": "its steps come so irregularly that the last one before a snapshot "
    "cannot be foreseen",
    "optimizer_step_failed": "its step raises",
    "optimizer_has_no_step_hooks": "it takes no hooks for its step",
    "copy_failed": "its parameters could not be copied",
    "not_copied": "its parameters cannot be copied",
    "cannot_be_measured": "its parameters cannot be read",
    "in_no_optimizer": "no parameter of the model is in an optimizer that was given",
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
