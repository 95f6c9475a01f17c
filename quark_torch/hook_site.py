"""One module that is looked at."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from quark_torch.kernel_reading import pack_limits
from quark_torch.layer_filter import SelectedModule, describe_type
from quark_torch.layer_traits import Layout
from quark_torch.partials import Wanted

__all__ = ["Site"]

_LAYOUTS = {None: 0, "channels": 1, "features": 2}


class Site:
    """One instrumented module.

    Attributes:
        name, kind, aliases: Its name, class and other names.
        module: The module, weakly.
        layout: Where its output has its units.
        near_zero: Epsilon of its activations.
        saturation: Its bounds, or None.
        calls: Counts its calls in the step.
        was_called: Whether it ever was.
        failed: Whether its hooks failed, and so do nothing any more.
        key: That of its forward hook in the module, once it had one.
        layout_code, limits: Layout, near_zero and saturation for compiled hooks.
    """

    __slots__ = (
        "aliases",
        "calls",
        "failed",
        "key",
        "kind",
        "layout",
        "layout_code",
        "limits",
        "module",
        "name",
        "near_zero",
        "saturation",
        "was_called",
    )

    def __init__(
        self,
        selected: SelectedModule,
        layout: Layout | None,
        near_zero: float,
        saturation: tuple[float, float] | None,
    ) -> None:
        self.name = selected.name
        self.kind = describe_type(selected.module)
        self.aliases = selected.aliases
        self.module = weakref.ref(selected.module)
        self.layout = layout
        self.near_zero = near_zero
        self.saturation = saturation
        self.calls = count()
        self.was_called = False
        self.failed = False
        self.key: int | None = None
        self.layout_code = _LAYOUTS[layout]
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
        module = self.module()
        is_list = module is not None and type(module).forward is nn.Module.forward
        return not (self.was_called or self.failed or is_list)
