"""What the step at which two runs part says of each difference.

Only what holds for sure is said. That two runs part before the first update does not clear
the optimizer's settings: they may still have brought the end about. It says that something
besides them differs.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

from quark.analysis.explanation.differences import Difference
from quark.analysis.explanation.history import PastRun
from quark.analysis.explanation.results import Parting
from quark.analysis.explanation.traits import encode_value

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


def fits_parting(difference: Difference, parting: Parting) -> bool | None:
    """Whether a difference is one that parts runs in this manner; None where nothing is said."""
    if parting.manner == "rounding":
        return True if difference.kind in _ENVIRONMENT else None
    if parting.manner == "later" and parting.equal_points >= _FEW_POINTS:
        if difference.kind == "seed":
            return False
        if difference.kind == "config" and _FROM_START.search(difference.place):
            return False
    return None


def weigh_parting(difference: Difference, parting: Parting) -> str | None:
    """What the parting says of a difference, in words, or None."""
    fits = fits_parting(difference, parting)
    if fits is None:
        return None
    if fits:
        return "parted by rounding first, as libraries, switches and machines do"
    return f"{parting.equal_points} points were the same to the bit before step {parting.step}"


def find_hidden_difference(
    history: Sequence[PastRun], differences: Sequence[Difference], parting: Parting
) -> str | None:
    """A note where the runs part before anything that is recorded as different could part them.

    That is so where all that differs is the optimizer's, while the first point of a metric
    parts of which runs in the history show that the optimizer does not reach it: they differ
    in such settings alone and have the same first point to the bit.
    """
    if parting.manner != "at_once" or not differences:
        return None
    if not all(is_optimizer_setting(each) for each in differences):
        return None
    for difference in differences:
        if not _is_untouched(history, difference):
            return None
    places = ", ".join(each.place for each in differences)
    return (
        f"The two part at step {parting.step}, where other runs that differ in {places} alone do "
        "not: something that was not recorded differs too."
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
