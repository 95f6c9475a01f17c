"""The first step at which two runs diverge, and what it says about each difference."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quark.analysis.curves import take_lowest_rank
from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.results import FirstDivergence
from quark.analysis.explanation.run_attributes import encode_value
from quark_core.backends.contract import SupportsRead
from quark_core.records import MetricRecord
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.reading import read_rows

Floats = NDArray[np.float64]
Curves = dict[str, tuple[NDArray[np.int64], Floats]]

_ROUNDING = 1e-5
"""Relative difference up to which two values may be apart by rounding alone."""

_GROWTH = 10.0
_FIRST_WINDOW = 256
_WINDOW_FACTOR = 8
_MOST_STEPS = 2**62
_CLOCKS = frozenset(
    """
    time times duration elapsed eta ms us ns sec secs second seconds minute minutes hours latency
    throughput fps mfu speed memory mem mb gb mib gib bytes gpu cpu temperature power utilization
    util samples_per tokens_per timestamp clock
    """.split()
)
_SETTINGS = re.compile(
    r"(^|[/_.-])(lr|learning_?rate|momentum|weight_?decay|wd|beta\d?|eps|epsilon|batch_?size"
    r"|epoch|global_step|step|iteration|tau|temperature)\d*$",
    re.IGNORECASE,
)
_CLOCK_SPACES = ("system", "telemetry", "hardware", "timer", "timers", "time", "gpu", "cpu")


def is_measured_by_clock(key: str) -> bool:
    """Whether a metric of this name says how long something took or how much room it needed."""
    name = decode_name(key).lower()
    if name.partition("/")[0] in _CLOCK_SPACES:
        return True
    words = re.split(r"[^a-z0-9]+", name.rpartition("/")[2])
    return "per" in words[1:] or any(word in _CLOCKS for word in words)


def is_setting(key: str) -> bool:
    """Whether a metric of this name is what the training was set to, such as its rate."""
    return _SETTINGS.search(decode_name(key)) is not None


def find_first_divergence(
    before: tuple[SupportsRead, str],
    after: tuple[SupportsRead, str],
    *,
    choose: Callable[[str], bool] | None = None,
) -> FirstDivergence:
    """Where the curves of two runs part, over all metrics that both have.

    Reads windows of steps, each larger than the one before, and no further than needed.

    Args:
        before, after: Reader and id of either run.
        choose: Which metrics count; by default all but what clocks measure and settings.

    Raises:
        SessionStoreError: A store cannot be read.
    """
    counts = choose or (lambda key: not is_measured_by_clock(key) and not is_setting(key))
    equal = 0
    seen = False
    for low, high in _windows():
        one, two = (_read(*side, low, high) for side in (before, after))
        shared = [key for key in one if key in two and counts(key)]
        found = [gap for key in shared if (gap := _find_gap(key, one[key], two[key])) is not None]
        seen = seen or bool(shared)
        if found:
            step = min(gap.step for gap in found)
            equal += sum(int((_match(one[key], two[key])[0] < step).sum()) for key in shared)
            return _describe(found, step, equal, (one, two), shared)
        # A point that one run alone has says nothing of both.
        equal += sum(len(_match(one[key], two[key])[0]) for key in shared)
        if high is None:
            break
    if not seen or not equal:
        words = "the two sides have no common step of any metric"
        return FirstDivergence("unknown", None, "step", None, 0, None, None, words)
    return FirstDivergence(
        "identical", None, "step", None, equal, None, None,
        f"all {equal} common points are bitwise identical"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Gap:
    """Where one metric parts."""

    key: str
    step: int
    relative: float


def _windows() -> Iterator[tuple[int, int | None]]:
    low, high = 0, _FIRST_WINDOW
    while high < 2**20:
        yield low, high - 1
        low, high = high, high * _WINDOW_FACTOR
    yield low, None


def _read(reader: SupportsRead, run_id: str, low: int, high: int | None) -> Curves:
    """Values by metric, of the lowest rank, the newest of a step; ascending by step."""
    query = Query(step_min=low, step_max=high)
    columns = take_lowest_rank(read_rows(reader, run_id, MetricRecord.KIND, query))
    if not columns.count:
        return {}
    keys, steps, values = columns["metric_key"], columns["step"], columns["value"]
    names, groups = np.unique(keys.astype(str), return_inverse=True)
    out: Curves = {}
    for index, name in enumerate(names.tolist()):
        mine = groups == index
        its_steps = steps[mine].astype(np.int64)[::-1]
        its_values = values[mine].astype(np.float64)[::-1]
        # The newest point of a step is first here, which is the one that unique keeps.
        kept_steps, first = np.unique(its_steps, return_index=True)
        out[name] = kept_steps, its_values[first]
    return out


def _match(
    one: tuple[NDArray[np.int64], Floats], two: tuple[NDArray[np.int64], Floats]
) -> tuple[NDArray[np.int64], Floats, Floats]:
    steps, first, second = np.intersect1d(one[0], two[0], assume_unique=True, return_indices=True)
    return steps, one[1][first], two[1][second]


def _find_gap(
    key: str,
    one: tuple[NDArray[np.int64], Floats],
    two: tuple[NDArray[np.int64], Floats],
) -> _Gap | None:
    steps, first, second = _match(one, two)
    apart = np.flatnonzero(~((first == second) | (np.isnan(first) & np.isnan(second))))
    if not len(apart):
        return None
    at = int(apart[0])
    return _Gap(key, int(steps[at]), _relate(float(first[at]), float(second[at])))


def _relate(one: float, two: float) -> float:
    if not (math.isfinite(one) and math.isfinite(two)):
        return math.inf
    size = max(abs(one), abs(two))
    return abs(one - two) / size if size > 0.0 else 0.0


def _describe(
    found: Sequence[_Gap],
    step: int,
    equal: int,
    curves: tuple[Curves, Curves],
    shared: Sequence[str],
) -> FirstDivergence:
    first = [gap for gap in found if gap.step == step]
    worst = max(first, key=lambda gap: gap.relative)
    name = decode_name(worst.key)
    if 0.0 < worst.relative <= _ROUNDING:
        settled = _find_settled(curves, shared)
        grown = "" if settled is None else f", and by more from step {settled} on"
        return FirstDivergence(
            "rounding", step, "step", worst.key, equal, worst.relative, settled,
            f"the runs diverge at step {step} by rounding ({name}, relative "
f"{worst.relative:.1g}){grown}"
        )  # fmt: skip
    if equal == 0:
        return FirstDivergence(
            "at_once", step, "step", worst.key, 0, worst.relative, None,
            f"the runs diverge at step {step}, the first one; no value was bitwise identical"
        )  # fmt: skip
    return FirstDivergence(
        "later", step, "step", worst.key, equal, worst.relative, None,
        f"bitwise identical before step {step}, where {name} diverges"
    )  # fmt: skip


def _find_settled(curves: tuple[Curves, Curves], shared: Sequence[str]) -> int | None:
    """The first step within what was read at which they are apart by more than rounding."""
    one, two = curves
    steps = []
    for key in shared:
        at, first, second = _match(one[key], two[key])
        size = np.maximum(np.abs(first), np.abs(second))
        with np.errstate(invalid="ignore"):
            far = np.flatnonzero(np.abs(first - second) > _GROWTH * _ROUNDING * size)
        if len(far):
            steps.append(int(at[far[0]]))
    return min(steps, default=None)


# What the step at which two runs part says of each difference.
#
# Only what holds for sure is said. That two runs part before the first update does not clear
# the optimizer's settings: they may still have brought the end about. It says that something
# besides them differs.

_OPTIMIZER = re.compile(
    r"(^|[._/-])(lr|learning_?rate|momentum|weight_?decay|wd|betas?|beta_?[12]|eps(ilon)?"
    r"|optim(izer)?|nesterov|amsgrad|dampening|warm_?up(_steps|_epochs|_ratio)?|scheduler?"
    r"|lr_?schedule|clip(_norm|_value|_grad)?|grad(ient)?_clip(ping)?(_norm)?|max_grad_norm)"
    r"([._/-]|$)",
    re.IGNORECASE,
)
_FROM_START = re.compile(
    r"(^|[._/-])(width|depth|hidden|layers?|dim|d_model|heads?|init|batch_?size|arch(itecture)?"
    r"|model|in_features|channels)([._/-]|$)",
    re.IGNORECASE,
)
_ENVIRONMENT = ("switch", "package", "hardware")
_FEW_POINTS = 5


def is_optimizer_setting(difference: Difference) -> bool:
    """Whether a difference is, by its name, one of the optimizer's settings."""
    named = difference.kind in ("config", "launch")
    return named and _OPTIMIZER.search(difference.place) is not None


def fits_divergence(difference: Difference, divergence: FirstDivergence) -> bool | None:
    """Whether a difference is one that parts runs in this manner; None where nothing is said."""
    if divergence.manner == "rounding":
        return True if difference.kind in _ENVIRONMENT else None
    if divergence.manner == "later" and divergence.equal_points >= _FEW_POINTS:
        if difference.kind == "seed":
            return False
        if difference.kind == "config" and _FROM_START.search(difference.place):
            return False
    return None


def score_divergence(difference: Difference, divergence: FirstDivergence) -> str | None:
    """What the divergence says of a difference, in words, or None."""
    fits = fits_divergence(difference, divergence)
    if fits is None:
        return None
    if fits:
        return "diverged by rounding first, as with other libraries, switches or hardware"
    return f"{divergence.equal_points} points were bitwise identical before step {divergence.step}"


def find_hidden_difference(
    history: Sequence[PastRun], differences: Sequence[Difference], divergence: FirstDivergence
) -> str | None:
    """A note where the runs part before anything that is recorded as different could part them.

    That is so where all that differs is the optimizer's, while the first point of a metric
    parts of which runs in the history show that the optimizer does not reach it: they differ
    in such settings alone and have the same first point to the bit.
    """
    if divergence.manner != "at_once" or not differences:
        return None
    if not all(is_optimizer_setting(each) for each in differences):
        return None
    for difference in differences:
        if not _is_untouched(history, difference):
            return None
    places = ", ".join(each.place for each in differences)
    return (
        f"The two sides diverge at step {divergence.step}, where other runs that differ only in "
        f"{places} do not. Something that was not recorded also differs."
    )


def _is_untouched(history: Sequence[PastRun], difference: Difference) -> bool:
    """Whether two runs that differ in this alone, seeds the same, began at the same bit."""
    found: dict[Hashable, dict[bytes, set[float]]] = {}
    for run in history:
        if run.first is None or run.seed is None:
            continue
        rest = run.sign_rest(difference.key), run.seed
        own = encode_value(run.traits.values.get(difference.key))
        found.setdefault(rest, {}).setdefault(own, set()).add(run.first)
    groups = [values for values in found.values() if len(values) > 1]
    return bool(groups) and all(len(set.union(*values.values())) == 1 for values in groups)
