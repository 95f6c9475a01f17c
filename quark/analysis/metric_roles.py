"""The roles of metrics: what the user names, conventional keys, and the objectives of a sweep."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from quark_core.config.objective import (
    ACCURACIES,
    ANOTHER_FIGURE,
    LOSSES,
    NAMED_LOSSES,
    REWARDS,
    SCORES,
    ObjectiveMode,
    infer_mode,
    read_objective,
    split_name,
)
from quark_core.records.names import encode_name
from quark_core.records.runs import digest_config
from quark_core.records.sweeps import StoredSweep, StoredTrial

if TYPE_CHECKING:
    from quark.analysis.curves import Curve
    from quark_core.backends.run_summary import MetricSummary, RunSummary

CurvePart = Literal["train loss", "train accuracy", "validation loss", "validation accuracy"]
PART_KEYS: Mapping[CurvePart, tuple[str, ...]] = {
    "train loss": ("train/loss", "training/loss"),
    "train accuracy": ("train/accuracy", "training/accuracy", "train/acc"),
    "validation loss": ("val/loss", "validation/loss"),
    "validation accuracy": ("val/accuracy", "validation/accuracy", "val/acc"),
}
"""Conventional names of the metric of each part; the first that a run has counts."""

_PLAYER = re.compile(r"disc|critic|judge|adversar|fake|real_loss")
_PLAYERS = frozenset("d g generator netd netg".split())  # whose loss it is, beside a word for one

_VALIDATION = frozenset("val valid validation eval evaluation dev heldout holdout".split())
_TEST = frozenset("test testing".split())
_TRAIN = frozenset("train training trn tr fit learn".split())
# Words that say over what a figure is taken, not what it is.
_QUALIFIERS = frozenset(
    """
    avg average averaged mean running total sum overall epoch epochs step steps batch iter
    iteration ema smooth smoothed global raw full final current per set data dataset split
    metric metrics scalar scalars logs history model net main torch the of on in
    """.split()
)
# Says which loss it is, beside a word that says that it is one.
_KIND_OF_LOSS = frozenset(
    """
    cross entropy log likelihood negative neg squared absolute root error err square l1 l2 focal
    dice triplet contrastive ctc binary categorical sparse softmax logits bits character byte dim
    token
    """.split()
)
_TOGETHER_LOSS = (
    frozenset({"cross", "entropy"}),
    frozenset({"neg", "likelihood"}),
    frozenset({"negative", "likelihood"}),
    frozenset({"squared", "error"}),
    frozenset({"absolute", "error"}),
    frozenset({"bits", "dim"}),
    frozenset({"bits", "byte"}),
    frozenset({"bits", "character"}),
)
_ALONE_LOSS = frozenset("error err l1 l2".split())
_NO_ERROR = frozenset("standard io os page memory network disk".split())  # errors of other things
_OF_A_PLAYER = 4  # rank of a loss that is taken where there is no other one
_OF_AN_ACCURACY = frozenset(
    "balanced binary categorical sparse macro micro weighted multiclass top 1 at score".split()
)
_GRADIENT_NORM = re.compile(
    r"(^|[/_.-])(grad|gradient|gradients)([/_.-]?(global|total))?[/_.-]?norm$"
)
_RATE = re.compile(r"(^|[/_.-])(lr|learning_rate|learning-rate)([/_.-]?\d+)?$")

_OWN = ("system/", "quark/")
Role = Literal["loss", "accuracy", "score"]
# What a name says of the part never contradicts what it says of the direction.
_MODES: Mapping[Role, str] = {"loss": "min", "accuracy": "max", "score": "max"}
Found = TypeVar("Found", bound=Sized)
Metrics = Mapping[str, "Curve"]


class _Part(NamedTuple):
    """What a metric's name says of it: `rank` is lower the more plainly it says so."""

    role: Role
    held_out: bool
    rank: int


def is_player_loss(key: str) -> bool:
    """Whether a loss is that of one of two players (`Loss_D`, `errG`), whose level says little."""
    if _PLAYER.search(key.lower()) is not None:
        return True
    words = set(split_name(key))
    return not words.isdisjoint(_PLAYERS) and not words.isdisjoint(LOSSES | _ALONE_LOSS)


def is_loss(key: str) -> bool:
    """Whether a metric is a loss by its name."""
    part = _read(key)
    return part is not None and part.role == "loss"


def is_held_out(key: str) -> bool:
    """Whether a metric's name says that it is measured on data that is not trained on."""
    words = set(split_name(key))
    return not words.isdisjoint(_VALIDATION | _TEST)


def is_score(key: str) -> bool:
    """Whether a metric is an accuracy, a reward or the like by its name: the higher the better."""
    part = _read(key)
    return part is not None and part.role != "loss"


def is_reward(key: str) -> bool:
    """Whether a metric is a reward by its name, which may rise whatever a loss does."""
    part = _read(key)
    if part is None or part.role != "score":
        return False
    return not (REWARDS | {"rate"}).isdisjoint(split_name(key))


def names_a_part(key: str) -> bool:
    """Whether rules look at a metric of this name: a loss, a score, a norm, a rate, a time."""
    if key.startswith(_OWN):
        return key.endswith("_time_ms")
    lower = key.lower()
    return (
        _read(key) is not None
        or _GRADIENT_NORM.search(lower) is not None
        or _RATE.search(lower) is not None
    )


def find_main_metric(summary: RunSummary) -> MetricSummary | None:
    """The metric that a run is judged by: what the user named and logged, else its loss."""
    named = read_objective(summary.config)
    if named is not None and named.metric in summary.metrics:
        return summary.metrics[named.metric]
    key = choose_loss({key: metric.count for key, metric in summary.metrics.items()})
    return None if key is None else summary.metrics[key]


def choose_loss(points: Mapping[str, int]) -> str | None:
    """Of some metrics the one that is the loss, by names and numbers of points, or None.

    The training's, where there is one; else that of a validation.
    """
    parts: tuple[CurvePart, ...] = ("train loss", "validation loss")
    for part in parts:
        known = next((key for key in PART_KEYS[part] if points.get(key)), None)
        found = known or _choose(points, "loss", held_out=part == "validation loss")
        if found is not None:
            return found
    return None


def find_named(metrics: Mapping[str, Found], name: str) -> tuple[str, Found] | None:
    """The metric of a name, as it was logged or as it is stored."""
    for key in (name, encode_name(name)):
        if key in metrics and len(metrics[key]):
            return key, metrics[key]
    return None


def prefer_objective(
    keys: Iterable[str], metric: str | None, mode: str | None, *, held_out: bool
) -> tuple[str, ...]:
    """Keys of a loss, and with them that which the user named, where it is one of this data.

    It goes before them where its name says that it is a loss, and after them where its name says
    nothing; an error rate or the like is none.
    """
    if metric is None or is_held_out(metric) is not held_out:
        return tuple(keys)
    if (mode or infer_mode(metric) or "min") == "max":
        return tuple(keys)
    named = (metric, encode_name(metric))
    if is_loss(metric):
        return tuple(dict.fromkeys((*named, *keys)))
    return tuple(dict.fromkeys((*keys, *named))) if infer_mode(metric) is None else tuple(keys)


def find_curve(metrics: Metrics, keys: Iterable[str]) -> Curve | None:
    """The first of these keys that the run has points of."""
    for key in keys:
        if key in metrics and len(metrics[key]):
            return metrics[key]
    return None


def find_part(metrics: Metrics, part: CurvePart, keys: Iterable[str] | None = None) -> Curve | None:
    """A loss or an accuracy: one of the keys, or else a metric that is called so."""
    known = find_curve(metrics, PART_KEYS[part] if keys is None else keys)
    role: Role = "loss" if part.endswith("loss") else "accuracy"
    return known or _find(metrics, role, held_out=part.startswith("validation"))


def find_gradient_norm(metrics: Metrics) -> Curve | None:
    """The norm of all gradients together, where the run logs it."""
    return _find_most(metrics, lambda key: _GRADIENT_NORM.search(key.lower()) is not None)


def find_learning_rate(metrics: Metrics) -> Curve | None:
    """The learning rate, where the run logs it."""
    return _find_most(metrics, lambda key: _RATE.search(key.lower()) is not None)


def _find(metrics: Metrics, role: Role, *, held_out: bool) -> Curve | None:
    points = {key: len(curve) for key, curve in metrics.items()}
    found = _choose(points, role, held_out=held_out)
    return None if found is None else metrics[found]


def _choose(points: Mapping[str, int], role: Role, *, held_out: bool) -> str | None:
    """The metric that says most plainly to be it; of equals that with the most points."""
    fits = [
        (part.rank, -count, len(key), key)
        for key, count in points.items()
        if count
        and (part := _read(key)) is not None
        and (part.role, part.held_out) == (role, held_out)
    ]
    return min(fits)[-1] if fits else None


def _find_most(metrics: Metrics, fits: Callable[[str], bool]) -> Curve | None:
    """The training's fitting metric with the most points; of equals the shortest name."""
    found = [
        key
        for key, curve in metrics.items()
        if len(curve) and not key.startswith(_OWN) and fits(key) and not is_held_out(key)
    ]
    best = min(found, key=lambda key: (-len(metrics[key]), len(key), key), default=None)
    return None if best is None else metrics[best]


@lru_cache(maxsize=65_536)
def _read(key: str) -> _Part | None:
    """What a name says: `Loss/train`, `val_nll`, `trainLossEpoch`; None where it says nothing."""
    if key.startswith(_OWN):
        return None
    words = split_name(key)
    known = set(words)
    held_out = not known.isdisjoint(_VALIDATION | _TEST)
    on_test = known.isdisjoint(_VALIDATION) and not known.isdisjoint(_TEST)
    rest = [
        word
        for word in words
        if word not in _VALIDATION | _TEST | _TRAIN | _QUALIFIERS and not word.isdigit()
    ]
    role, rank = _read_role(set(rest), rest)
    mode = infer_mode(key)
    if role is not None and mode != _MODES[role]:
        role = None
    if role is None and mode == "max" and rest and _names_a_result(rest[-1]):
        role, rank = "score", 1
    if role is None:
        return None
    if role == "loss" and is_player_loss(key):
        rank = _OF_A_PLAYER
    # A test is the last word on a run, a validation the one that comes again and again.
    return _Part(role, held_out, 2 * rank + on_test)


def _names_a_result(word: str) -> bool:
    return word == "rate" or word in SCORES or word.rstrip("0123456789") in SCORES


def _read_role(what: set[str], rest: list[str]) -> tuple[Role | None, int]:
    if not rest:
        return None, 0
    if what <= ACCURACIES | _OF_AN_ACCURACY and what & ACCURACIES:
        return "accuracy", 0
    if rest[-1] in ACCURACIES:
        return "accuracy", 1
    if not what.isdisjoint(ANOTHER_FIGURE):
        return None, 0
    if what <= LOSSES:
        return "loss", 0
    if what <= LOSSES | NAMED_LOSSES | _KIND_OF_LOSS and (
        not what.isdisjoint(LOSSES | NAMED_LOSSES) or any(pair <= what for pair in _TOGETHER_LOSS)
    ):
        return "loss", 1
    # One term of several, or one of several losses.
    if rest[-1] in LOSSES | NAMED_LOSSES or rest[0] in LOSSES:
        return "loss", 2
    if (what <= _ALONE_LOSS | _PLAYERS and what & _ALONE_LOSS) or (
        rest[-1] == "error" and what.isdisjoint(_NO_ERROR)
    ):
        return "loss", 3
    if rest[-1] in SCORES:
        return ("loss", 2) if what & {"neg", "negative"} else ("score", 0)
    return None, 0


def list_objectives(definition: Mapping[str, Any]) -> list[tuple[str, ObjectiveMode]]:
    """The metrics of a sweep, each with its mode; what was defined wrongly is guessed or let go."""
    metrics, modes = definition.get("metric"), definition.get("mode")
    names = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    words = modes if isinstance(modes, (list, tuple)) else [modes] * len(names)
    found: list[tuple[str, ObjectiveMode]] = []
    for place, name in enumerate(names):
        if not isinstance(name, str):
            continue
        word = words[place] if place < len(words) else None
        guess: ObjectiveMode = infer_mode(name) or "min"
        found.append((name, word if word in ("min", "max") else guess))
    return found


def pick_comparable(
    sweep: StoredSweep, trials: Iterable[StoredTrial], *, least: int = 1
) -> list[StoredTrial]:
    """Completed trials that keep all constraints and had the same budget: the largest.

    What was pruned, or had a smaller budget, has another value only because it stopped earlier.

    Args:
        sweep: The sweep.
        trials: Its trials.
        least: How many configurations there must be; where so many had no budget, the largest
            that so many had, or else that which most had. Of a halving the last rung has one.
    """
    levels: dict[float, list[StoredTrial]] = defaultdict(list)
    is_constrained = bool(sweep.definition.get("constraints"))
    for trial in trials:
        broken = trial.constraints or ()
        # Of what was never measured nobody knows whether it is kept.
        keeps_all = all(value <= 0.0 for value in broken) and (bool(broken) or not is_constrained)
        if trial.state == "completed" and trial.values and keeps_all:
            levels[_find_level(trial)].append(trial)
    # What was added by hand has no budget, and so the whole.
    free = levels.pop(math.inf, [])
    ordered = [levels[level] for level in sorted(levels, reverse=True)] or [[]]
    ordered[0] = sorted([*free, *ordered[0]], key=lambda trial: trial.number)
    for members in ordered:
        if len({digest_config(trial.parameters) for trial in members}) >= least:
            return members
    return max(ordered, key=len)


def find_best_trial(sweep: StoredSweep, trials: Iterable[StoredTrial]) -> StoredTrial | None:
    """The trial that has the best value of the first metric, of equal ones the first; or None."""
    objectives = list_objectives(sweep.definition)
    if not objectives:
        return None
    sign = 1.0 if objectives[0][1] == "max" else -1.0
    known = [
        (sign * trial.values[0], -trial.number, trial)
        for trial in pick_comparable(sweep, trials)
        if trial.values and trial.values[0] is not None and math.isfinite(trial.values[0])
    ]
    return max(known, key=lambda each: each[:2])[2] if known else None


def _find_level(trial: StoredTrial) -> float:
    for name in ("budget", "rung"):
        value = trial.origin.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return math.inf
