"""One module that is looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quark_torch.layer_filter import SelectedModule, describe_type
from quark_torch.layers.traits import UnitRule
from quark_torch.measuring.kernel_reading import pack_limits
from quark_torch.measuring.partials import Wanted


class Site:
    """One instrumented module.

    Attributes:
        name, kind, aliases: Its name, class and other names.
        module: The module, weakly.
        units: Where its output has its units.
        near_zero: Epsilon of its activations.
        saturation: Its bounds, or None.
        calls: Counts its calls in the step.
        was_called: Whether it ever was.
        failed: Whether its hooks failed, and so do nothing any more.
        key: That of its forward hook in the module, once it had one.
        find_units, limits: `units` (a code, or a function to ask), near_zero and saturation for
            compiled hooks.
    """

    __slots__ = (
        "aliases",
        "calls",
        "failed",
        "find_units",
        "key",
        "kind",
        "limits",
        "module",
        "name",
        "near_zero",
        "saturation",
        "units",
        "was_called",
    )

    def __init__(
        self,
        selected: SelectedModule,
        units: UnitRule,
        near_zero: float,
        saturation: tuple[float, float] | None,
    ) -> None:
        self.name = selected.name
        self.kind = describe_type(selected.module)
        self.aliases = selected.aliases
        self.module = weakref.ref(selected.module)
        self.units = units
        self.near_zero = near_zero
        self.saturation = saturation
        self.calls = count()
        self.was_called = False
        self.failed = False
        self.key: int | None = None
        code = units.code
        self.find_units: int | Callable[[Tensor], int | None] = (
            units.choose if code is None else code
        )
        self.limits = pack_limits(Wanted(near_zero, saturation))

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Name, class and other names."""
        return self.name, self.kind, self.aliases

    def register(self, module: nn.Module, hook: Any) -> RemovableHandle:
        """Register the module's forward hook, and note its key for the next time."""
        handle: RemovableHandle = module.register_forward_hook(hook)
        if type(module).register_forward_hook is nn.Module.register_forward_hook:
            self.key = handle.id
        return handle

    @property
    def is_missing(self) -> bool:
        """Whether it was never called, though it could have been, unlike a list of modules."""
        if self.was_called or self.failed:
            return False
        # A scripted module's class has no forward to be asked for, and a foreign one may have any.
        methods = [vars(kind).get("forward") for kind in type(self.module()).__mro__]
        forward = next((method for method in methods if method is not None), None)
        return forward is not vars(nn.Module)["forward"]
