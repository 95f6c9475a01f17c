"""By what a GradScaler has multiplied the gradients that are there now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

__all__ = ["GradientScale"]


class GradientScale:
    """Follows a GradScaler from one snapshot to the next.

    Args:
        scaler: A GradScaler, a function that returns its scale, or None.
        optimizers: The optimizers.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaler = scaler
        self._optimizers = optimizers
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
