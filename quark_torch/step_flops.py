"""FLOPs of one training step, counted from the operations that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from quark_torch.layer_filter import name_modules
from quark_torch.notices import InstrumentationNotices

# The first steps warm up what is compiled or chosen at run time.
_COUNTED_STEP = 2
# Where every step is probed, one of them is counted all the same.
_LAST_STEP = 8


class _FlopMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch says no types
    """Adds up the FLOPs of matrix products, convolutions and attention that run below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        return out


def count_flops(function: Callable[[], Any]) -> int:
    """FLOPs of matrix products, convolutions and attention that a function runs, backward included.

    A multiplication and an addition are two. Counted by the formulas of
    `torch.utils.flop_counter`. Call it once, outside of the loop, with a function
    that makes one step: `count_flops(lambda: model(x).sum().backward())`. What
    activation checkpointing computes again is counted again; code that is
    compiled is not seen.

    Returns:
        The number of FLOPs; 0 where none of these operations ran.
    """
    mode = _FlopMode()
    with mode:
        function()
    return mode.flops


class StepFlops:
    """Counts one early step of a loop, and from then on knows what a step does.

    Args:
        model: The model; where a part of it is compiled nothing is counted.
        notices: Who tells.
    """

    def __init__(self, model: nn.Module, notices: InstrumentationNotices) -> None:
        self._notices = notices
        self._mode: _FlopMode | None = None
        self._steps = 0
        self._flops: float | None = None
        self._is_done = any(place.is_compiled for place in name_modules(model))
        if self._is_done:
            self._tell("the model is compiled, and what runs in it cannot be counted")

    def __call__(self) -> float | None:
        """FLOPs of a step; None as long as that is not known."""
        return self._flops

    def begin_step(self, *, is_probed: bool) -> None:
        """Count this step, where it is the one."""
        self.end_step()
        if self._is_done:
            return
        self._steps += 1
        if self._steps < _COUNTED_STEP or (is_probed and self._steps < _LAST_STEP):
            return
        if torch.compiler.is_compiling():
            return
        self._is_done = True
        try:
            mode = _FlopMode()
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode = mode
        except Exception as error:  # noqa: BLE001 - training goes on without
            self._notices.fail("counting FLOPs", error)

    def end_step(self) -> None:
        """End the step that is counted."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        try:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - training goes on without
            self._notices.fail("counting FLOPs", error)
            return
        if mode.flops:
            self._flops = float(mode.flops)
        else:
            self._tell("no matrix product, convolution or attention was seen in the counted step")

    def _tell(self, reason: str) -> None:
        self._notices.warn(
            "flops_not_counted",
            f"FLOPs of a step are not known: {reason}; give flops_per_step as a number, or "
            "flops_per_token",
        )
