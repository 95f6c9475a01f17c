"""Layers through which nothing passes any more."""

from __future__ import annotations

import numpy as np

from quark_core.analysis.case import Case

__all__ = ["has_dead_layer"]

_DEAD = 0.9
_PROBES = 3


def has_dead_layer(case: Case) -> bool:
    """Whether a layer's units give nothing at its last probes: then no gradient passes either."""
    return any(
        float(np.nan_to_num(item["dead_unit_ratio"])[-_PROBES:].mean()) > _DEAD
        for item in case.run.activations.values()
        if len(item)
    )
