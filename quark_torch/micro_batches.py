"""How many micro-batches the gradients that are there now sum up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quark_torch.parameter_list import ParameterList

__all__ = ["MicroBatches"]


class _Count:
    """Called when a gradient has come to one parameter; holds it only weakly.

    Autograd adds in place to a gradient that is there, which its version
    tells from one that is new. What else changes gradients in place makes the
    number unknown, except where it comes before the first one, when it is
    taken for `zero_grad(set_to_none=False)`.
    """

    __slots__ = ("_handle", "_is_first", "_parameter", "_version", "number")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.number: int | None = None
        self._version = -1
        self._parameter = weakref.ref(parameter)
        self._handle: Any = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self
        )
        self.begin()

    def begin(self) -> None:
        """Another step begins: go on from the gradient that is there."""
        self._is_first = True
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self.number, self._version = 0, -1
        elif gradient.is_inference():
            self.number = None
        else:
            # It may have been clipped since the last one came, or set to zero.
            if gradient._version != self._version:
                self.number = None
            self._version = gradient._version

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient, is_first = parameter.grad, self._is_first
        self._is_first = False
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            self.number = None
            return
        version, known = gradient._version, self._version
        self._version = version
        if version <= known:
            self.number = 1
        elif version == known + 1:
            self.number = None if self.number is None else self.number + 1
        else:
            self.number = 1 if is_first else None

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it counts by this parameter."""
        return self._parameter() is parameter

    def remove(self) -> None:
        """Take the hook off the parameter."""
        self._handle.remove()


class MicroBatches:
    """Counts the backward passes of a step by one parameter of each optimizer.

    The hooks are there only while they are wanted.

    Args:
        optimizers: The optimizers; without one the index is -1.
        parameters: The model's.
        on_failure: Told of an exception, with the name of what went wrong.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: ParameterList,
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self._optimizers = optimizers
        self._parameters = parameters
        self._on_failure = on_failure
        self._counts: dict[int, _Count] = {}

    def begin(self) -> None:
        """Count from now on."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - training must go on
            self.end()
            self._on_failure("micro_batches_uncounted", error)

    def _begin(self) -> None:
        chosen: dict[int, torch.Tensor | None] = {}
        if not self._optimizers:
            chosen[-1] = _choose([listed.parameter for listed in self._parameters.known])
        for index, optimizer in enumerate(self._optimizers):
            held = [each for group in optimizer.param_groups for each in group["params"]]
            chosen[index] = _choose([each for each in held if self._parameters.has(each)])
        for index, parameter in chosen.items():
            count = self._counts.get(index)
            if count is not None and parameter is not None and count.is_of(parameter):
                count.begin()
                continue
            if count is not None:
                self._counts.pop(index).remove()
            if parameter is not None:
                self._counts[index] = _Count(parameter)

    def end(self) -> None:
        """Count no more."""
        if self._counts:
            for count in self._counts.values():
                count.remove()
            self._counts.clear()

    def find(self, index: int) -> int | None:
        """How many micro-batches an optimizer's gradients sum up; None where it is not known."""
        count = self._counts.get(index)
        return None if count is None or not count.number else count.number


def _choose(parameters: list[torch.Tensor]) -> torch.Tensor | None:
    """The last trained one: what is near the loss gets a gradient once in a backward pass."""
    trained = [each for each in reversed(parameters) if each.requires_grad and each.is_leaf]
    return next((each for each in trained if each.grad is not None), (*trained, None)[0])
