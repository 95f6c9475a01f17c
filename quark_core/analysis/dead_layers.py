"""Layers through which nothing passes any more."""

from __future__ import annotations

from quark_core.analysis.case import Case

__all__ = ["has_dead_layer"]


def has_dead_layer(case: Case) -> bool:
    """Whether a layer's units give nothing at its last probes: then no gradient passes either."""
    return case.ends_with_dead_layer
