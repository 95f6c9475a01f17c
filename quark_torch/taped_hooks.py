"""Hooks that have compiled code take what is ordinary, and what copies of hooks are."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["InertHook", "make_hook_types"]

_is_compiling = torch.compiler.is_compiling


class InertHook:
    """What a copy or a pickle of a model has in the place of a hook; does nothing."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""


@functools.cache
def make_hook_types(hooks: Any) -> tuple[Any, Any]:
    """As `ForwardHook` and `GradientHook` of `probes`, which ask compiled code first.

    They are Python's all the same, since dynamo has to see what they do: nothing.
    """

    class TapedForwardHook(hooks.Call):  # type: ignore[misc]
        __slots__ = ()

        def __call__(self, module: nn.Module, _args: object, output: object) -> None:
            if _is_compiling():
                return
            try:
                if self.take(module, output):
                    return
            except Exception as error:  # noqa: BLE001 - it must not reach the user's forward
                self.probed.fail(self.site, "forward hook", error)
                return
            self.probed.see_output(self.site, module, output)

        def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
            return InertHook()

        def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
            return InertHook, ()

    class TapedGradientHook(hooks.Gradient):  # type: ignore[misc]
        __slots__ = ()

        def __call__(self, gradient: Tensor) -> None:
            if _is_compiling():
                return
            try:
                if self.take(gradient):
                    return
            except Exception as error:  # noqa: BLE001 - it must not reach the user's backward
                self.probed.fail(self.site, "gradient hook", error)
                return
            self.probed.see_gradient(
                self.site, gradient, self.call_index, None, self.micro_batch, self.count_firing()
            )

        def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
            return InertHook()

        def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
            return InertHook, ()

    return TapedForwardHook, TapedGradientHook
