"""Facts that hold in healthy runs of a model and break in another run of it.

A training that is like one that went well in what it does at each step has the
same learning rates, updates of the same size, activations in the same range,
the same modules in training mode. Seeds and noise move such figures by a
factor of two; what went wrong moves them by tens, or to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quark.analysis.analysis_context import Case
from quark.analysis.curves import History, ParameterHistory
from quark.analysis.observations import format_number, observe
from quark.analysis.rule import Finding, Verdict
from quark.analysis.run_data import RunData
from quark_core.records.kinds.findings import AlertCategory, AlertSeverity

_LEAST_PROBES = 4  # that two runs have in the same stretch of steps
_SETTLED = 0.25  # share of these that is left out: the start differs from seed to seed
_BEYOND = 5.0  # times the range of the healthy runs
_GRADIENTS_BEYOND = 50.0
_RATE_APART = 2.0  # times a learning rate at the same step
_SHARE_APART = 0.3  # of units, modules or probes
_FROZEN_APART = 0.1  # of the elements
_GAP_APART = 4.0  # times the ratio of validation to training loss
_MOSTLY = 0.5
_LOW, _HIGH = 5.0, 95.0  # percentiles of a run that its range reaches from and to
_NAMED, _EVIDENCE = 5, 4

Floats = NDArray[np.float64]
Topic = Literal["steps", "rates", "updates", "gradients", "activations", "modes", "frozen", "gap"]


@dataclass(frozen=True)
class _Break:
    """One figure that is not what it is in the healthy runs.

    Attributes:
        what: The figure, in words.
        here, low, high: Its level, and what it was there.
    """

    topic: Topic
    name: str
    what: str
    here: float
    low: float
    high: float
    first: int
    last: int

    @property
    def distance(self) -> float:
        """How far it is away, to rank breaks of one topic."""
        if self.here <= 0.0 or self.low <= 0.0:
            return np.inf if self.low > 0.0 or self.here > self.high else 0.0
        return float(max(np.log(self.low / self.here), np.log(self.here / max(self.high, 1e-300))))


_SAID: dict[Topic, tuple[str, str, str]] = {
    "steps": (
        "Steps are not made as in the healthy run",
        "The loop does something else at each step than it did there.",
        "Compare the two loops: optimizer.step(), zero_grad(), accumulation, the modes.",
    ),
    "rates": (
        "The learning rate is not that of the healthy run",
        "The schedule, its length or its base rate is another one.",
        "Compare the two schedules at the same step.",
    ),
    "updates": (
        "Updates are not of the size that they have in the healthy run",
        "These weights train far faster, or slower, than they did there.",
        "Compare learning rates, clipping and what the optimizer holds.",
    ),
    "gradients": (
        "Gradients are not of the size that they have in the healthy run",
        "The loss, its scale or what leads to these weights is another one.",
        "Compare the loss, its reduction and the inputs.",
    ),
    "activations": (
        "Activations are not in the range of the healthy run",
        "What goes into these layers, or their weights, is another thing.",
        "Compare how the inputs are prepared, and the weights that are loaded.",
    ),
    "modes": (
        "Modules are evaluated in another mode than in the healthy run",
        "Validation figures of the two are not of the same network.",
        "Call model.eval() before the validation and model.train() after it.",
    ),
    "frozen": (
        "Another share of the model trains than in the healthy run",
        "Something was frozen, unfrozen or left out of the optimizer.",
        "Compare requires_grad and what the optimizer was given.",
    ),
    "gap": (
        "Validation is further from training than in the healthy run",
        "Held-out data are another thing, or what is learned does not carry over.",
        "Compare how the two sets are prepared, and in which mode the validation is made.",
    ),
}
"""Topic -> title, what follows, and what to look at."""


class HealthyBaseline:
    """A rule that holds a run against healthy ones of the same model.

    A figure breaks where it leaves the range that it has in all of them, by a
    factor that no seed explains. Only what both have is compared, at the steps
    that both have.

    Args:
        runs: The healthy runs.
        severity: Of what is found; a note where nobody has named the runs.
    """

    rule_id = "healthy_baseline"
    category: AlertCategory = "optimization"

    def __init__(self, runs: Sequence[RunData], severity: AlertSeverity = "warning") -> None:
        self._runs = tuple(runs)
        self._severity = severity

    def check(self, case: Case) -> Verdict:
        """Look for figures that are not what they are in the healthy runs."""
        healthy = [Case(run, case.config) for run in self._runs]
        found = [item for look in _LOOKS for item in look(case, healthy)]
        names = ", ".join(run.run_id for run in self._runs)
        if not found:
            return Verdict(reason=f"what holds in {names} holds here")
        by_topic: dict[Topic, list[_Break]] = {}
        for item in found:
            by_topic.setdefault(item.topic, []).append(item)
        return Verdict(
            findings=tuple(
                _describe(topic, items, names, self._severity) for topic, items in by_topic.items()
            )
        )


def is_alike(run: RunData, other: RunData) -> bool:
    """Whether two runs have parameters of the same names and sizes, and train them alike.

    That is with optimizers of the same classes, from the same learning rates on.
    """
    if not run.parameters or _list_sizes(run) != _list_sizes(other):
        return False
    for name, item in run.parameters.items():
        twin = other.parameters[name]
        rates = item["learning_rate"][:1], twin["learning_rate"][:1]
        if item.optimizer != twin.optimizer or not np.array_equal(*rates, equal_nan=True):
            return False
    return True


def _list_sizes(run: RunData) -> dict[str, float]:
    return {name: item.size for name, item in run.parameters.items()}


def _span(case: Case, healthy: Sequence[Case]) -> tuple[int, int]:
    """First and last step that all of the runs have, the start left out."""
    ends = [one.run.last_step for one in (case, *healthy)]
    last = min((end for end in ends if end is not None), default=0)
    return int(_SETTLED * last), last


def _cut(item: History, name: str, span: tuple[int, int]) -> Floats:
    """The finite values of a figure at the steps of a span."""
    inside = (item.step >= span[0]) & (item.step <= span[1])
    values = item[name][inside]
    return np.asarray(values[np.isfinite(values)])


def _range(healthy: Sequence[Floats]) -> tuple[float, float]:
    low = min(float(np.percentile(values, _LOW)) for values in healthy)
    return low, max(float(np.percentile(values, _HIGH)) for values in healthy)


def _pick(
    case: Case,
    healthy: Sequence[Case],
    table: Callable[[Case], object],
    figure: str,
) -> Iterator[tuple[History, float, float, float]]:
    """Each thing that all have: it, its median here, and the range that the healthy runs give."""
    span = _span(case, healthy)
    tables: list[dict[str, History]] = [table(one) for one in (case, *healthy)]  # type: ignore[misc]
    for name, item in tables[0].items():
        if not all(name in other for other in tables[1:]):
            continue
        here = _cut(item, figure, span)
        there = [_cut(other[name], figure, span) for other in tables[1:]]
        if min(len(values) for values in (here, *there)) < _LEAST_PROBES:
            continue
        yield item, float(np.median(here)), *_range(there)


def _parameters(case: Case) -> object:
    return case.run.parameters


def _weights(case: Case) -> object:
    return {
        name: item
        for name, item in case.run.parameters.items()
        if item.role == "weight" and item.requires_grad
    }


def _activations(case: Case) -> object:
    return case.run.activations


def _look_at_sizes(case: Case, healthy: Sequence[Case]) -> Iterator[_Break]:
    """Updates, gradients and activations that are far out of their range."""
    span = _span(case, healthy)
    wanted: tuple[tuple[Topic, str, str, Callable[[Case], object], float], ...] = (
        ("updates", "update_to_parameter_ratio", "update over weight", _weights, _BEYOND),
        ("gradients", "gradient_norm", "gradient norm", _weights, _GRADIENTS_BEYOND),
        ("activations", "rms", "size of the outputs", _activations, _BEYOND),
        ("activations", "std", "deviation of the outputs", _activations, _BEYOND),
    )
    for topic, figure, what, table, beyond in wanted:
        for item, here, low, high in _pick(case, healthy, table, figure):
            if low > 0.0 and not low / beyond <= here <= high * beyond:
                yield _Break(topic, item.name, what, here, low, high, *span)


def _look_at_shares(case: Case, healthy: Sequence[Case]) -> Iterator[_Break]:
    """Units that are dead or saturated, and steps that are made in another way."""
    span = _span(case, healthy)
    wanted: tuple[tuple[Topic, str, str, Callable[[Case], object]], ...] = (
        ("activations", "dead_unit_ratio", "share of dead units", _activations),
        ("activations", "saturation_ratio", "share of saturated outputs", _activations),
    )
    for topic, figure, what, table in wanted:
        for item, here, low, high in _pick(case, healthy, table, figure):
            if here > high + _SHARE_APART:
                yield _Break(topic, item.name, what, here, low, high, *span)
    marks = (
        ("no_optimizer_step", "share of probes without a step of the optimizer"),
        ("skipped", "share of probes whose step was skipped"),
        ("carried_over", "share of probes with gradients that were not cleared"),
        ("evaluation_mode", "share of probes in evaluation mode"),
    )
    for mark, what in marks:
        found = list(_pick(case, healthy, _parameters, mark))
        for item, here, low, high in found[:1]:
            if here > _MOSTLY > high:
                yield _Break("steps", item.name, what, here, low, high, *span)
    for item, here, low, high in _pick(case, healthy, _activations, "calls"):
        if not low <= here <= high:
            yield _Break("steps", item.name, "calls in a step", here, low, high, *span)


def _look_at_rates(case: Case, healthy: Sequence[Case]) -> Iterator[_Break]:
    """Learning rates at the same steps."""
    seen: set[tuple[float, ...]] = set()
    for name, item in case.run.parameters.items():
        for other in healthy:
            twin = other.run.parameters.get(name)
            if twin is None:
                continue
            steps = np.intersect1d(item.step, twin.step)
            here = item["learning_rate"][np.searchsorted(item.step, steps)]
            there = twin["learning_rate"][np.searchsorted(twin.step, steps)]
            known = (here > 0) & (there > 0)
            if known.sum() < _LEAST_PROBES:
                continue
            ratio = float(np.median(here[known] / there[known]))
            level, usual = float(np.median(here[known])), float(np.median(there[known]))
            if 1 / _RATE_APART < ratio < _RATE_APART or (level, usual) in seen:
                continue
            seen.add((level, usual))
            span = int(steps[0]), int(steps[-1])
            yield _Break("rates", name, "learning rate", level, usual, usual, *span)
            break


def _look_at_modes(case: Case, healthy: Sequence[Case]) -> Iterator[_Break]:
    for name, item in case.run.activations.items():
        there = [
            other.run.activations[name].evaluations
            for other in healthy
            if name in other.run.activations and other.run.activations[name].evaluations
        ]
        if not item.evaluations or not there:
            continue
        here = float(np.mean(list(item.evaluations.values())))
        levels = [float(np.mean(list(seen.values()))) for seen in there]
        if here > _MOSTLY > max(levels):
            span = min(item.evaluations), max(item.evaluations)
            what = "share of evaluations in training mode"
            yield _Break("modes", name, what, here, min(levels), max(levels), *span)


def _look_at_frozen(case: Case, healthy: Sequence[Case]) -> Iterator[_Break]:
    """Shares of the elements that are frozen, and that no optimizer has."""
    last = case.run.last_step or 0

    def is_frozen(item: ParameterHistory) -> bool:
        return not item.requires_grad

    def is_outside(item: ParameterHistory) -> bool:
        return item.requires_grad and item.in_optimizer is False

    asked = (
        (is_frozen, "share of the elements that are frozen"),
        (is_outside, "share of the elements that should train and are in no optimizer"),
    )
    for is_it, what in asked:
        shares = [_share(one, is_it) for one in (case, *healthy)]
        if any(share is None for share in shares):
            continue
        here, *there = [share for share in shares if share is not None]
        if not min(there) - _FROZEN_APART <= here <= max(there) + _FROZEN_APART:
            named = [name for name, item in case.run.parameters.items() if is_it(item)]
            name = named[0] if named else next(iter(case.run.parameters))
            yield _Break("frozen", name, what, here, min(there), max(there), 0, last)


def _share(case: Case, is_it: Callable[[ParameterHistory], bool]) -> float | None:
    sizes = _list_sizes(case.run)
    whole = sum(sizes.values())
    if not whole:
        return None
    items = case.run.parameters
    return sum(size for name, size in sizes.items() if is_it(items[name])) / whole


def _look_at_gap(case: Case, healthy: Sequence[Case]) -> Iterator[_Break]:
    """The ratio of validation to training loss at the end."""
    here, *there = (_find_gap(one) for one in (case, *healthy))
    known = [gap for gap in there if gap is not None]
    if here is None or len(known) < len(there):
        return
    low, high = min(known), max(known)
    if here > _GAP_APART * max(high, 1.0):
        name = "" if case.validation_loss is None else case.validation_loss.key
        last = case.run.last_step or 0
        what = "validation loss over training loss at the end"
        yield _Break("gap", name, what, here, low, high, last, last)


def _find_gap(case: Case) -> float | None:
    train, validation = case.outcome.train, case.outcome.validation
    if train is None or validation is None or train.final <= 0 or validation.final <= 0:
        return None
    return validation.final / train.final


_LOOKS: tuple[Callable[[Case, Sequence[Case]], Iterator[_Break]], ...] = (
    _look_at_shares,
    _look_at_rates,
    _look_at_frozen,
    _look_at_modes,
    _look_at_sizes,
    _look_at_gap,
)


def _describe(
    topic: Topic, items: Sequence[_Break], names: str, severity: AlertSeverity
) -> Finding:
    title, inference, check = _SAID[topic]
    worst = max(items, key=lambda item: item.distance)
    others = tuple(dict.fromkeys(_strip(item.name) for item in items if item.name != worst.name))
    there = format_number(worst.low)
    if worst.high != worst.low:
        there += f" to {format_number(worst.high)}"
    more = f" So are {len(others)} more: {', '.join(others[:_NAMED])}." if others else ""
    return Finding(
        culprit=_strip(worst.name) or None,
        severity=severity,
        title=title,
        fact=f"{worst.name}: the {worst.what} is {format_number(worst.here)}, and {there} in "
        f"{names}.{more}",
        inference=inference,
        suggested_check=check,
        evidence=tuple(
            piece
            for item in items[:_EVIDENCE]
            for piece in (
                observe("baseline", item.name, f"{item.what} here", item.here, None,
                        item.first, item.last),
                observe("baseline", item.name, f"{item.what} in {names}",
                        item.low if item.here < item.low else item.high, None,
                        item.first, item.last),
            )
        ),
        step=worst.first,
        step_end=worst.last,
        affected=others,
    )  # fmt: skip


def _strip(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")
