"""Which module to edit: where something shows is not always where it is made."""

from __future__ import annotations

from quark.analysis.run_data import RunData

_WEIGHTED = ("Linear", "Conv1d", "Conv2d", "Conv3d", "LazyLinear", "Embedding", "Bilinear")


def find_feeding_module(run: RunData, name: str) -> str:
    """The module whose weights make what this one gives: itself, or the nearest before it.

    An activation such as ReLU has nothing to edit: whether its units are dead is decided by the
    layer that feeds it. Modules count in the order in which they were called.
    """
    holders = {item.module_name for item in run.parameters.values()}
    kinds = {other: item.kind for other, item in run.activations.items()}
    if name not in kinds:
        return name
    called = list(kinds)
    for other in reversed(called[: called.index(name) + 1]):
        if other in holders or kinds[other] in _WEIGHTED:
            return other
    return name
