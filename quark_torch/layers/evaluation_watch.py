"""In which mode modules are when a model is called to be evaluated."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quark_torch.layers.recording import Modes
from quark_torch.layers.tape import InertHook
from quark_torch.module_modes import depends_on_mode

_is_compiling = torch.compiler.is_compiling

# So many evaluations are looked for in steps that are not probed, in so many steps.
_ENOUGH = 8
_MOST_STEPS = 50_000
# Training passes outside of a step that has begun, before it is given up: several optimizers may
# step in one.
_MOST_STRAYS = 3


class EvaluationWatch:
    """Notes in which mode modules are when the model is called without gradients.

    It listens by a hook on the model itself: from a probed step's begin to the
    next training pass, and, until it has seen a few evaluations, also from the
    optimizer's step to there in the other steps, so that evaluations are seen
    on either side of a step's begin. The training pass takes the hook out.
    Where several do without a step's begin, because steps are begun in another
    way, it listens there no more. On a model in which no mode matters it does
    nothing.

    A call in evaluation mode counts for more than one in training mode, such as
    a pass that makes labels.

    Args:
        model: The model, without its wrappers; held weakly.
        modules: Instrumented modules by name; of those that depend on the mode
            it is noted.

    Attributes:
        is_active: Whether it is to be told of each step's begin.
        is_waiting: Whether it is to be told of the optimizer's steps.
    """

    def __init__(self, model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._model = weakref.ref(model)
        self._modules = [
            (name, weakref.ref(module)) for name, module in modules if depends_on_mode(module)
        ]
        self._hook = _PassHook(self)
        self._key: int | None = None
        self._is_placed = self._in_step = self._is_done = False
        self._step = 0
        self._seen = 0
        self._steps_left = _MOST_STEPS
        self._strays = 0
        self._found: dict[int, dict[str, bool]] = {}
        self.is_active = self.is_waiting = bool(self._modules)

    def begin_step(self, step: int) -> None:
        """A step begins: what came before it was seen or not."""
        if self._is_placed and not self.is_waiting:
            self._remove()
        self._step, self._is_done, self._in_step, self._strays = step, False, False, 0
        self.is_active = self.is_waiting

    def probe(self) -> None:
        """The step that has begun is probed."""
        self._in_step = True
        self._place()

    def end_step(self) -> None:
        """The probed step has ended."""
        self._in_step = False

    def note_step(self) -> None:
        """An optimizer of the model is about to step."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.is_waiting = False
        elif not self._is_placed:
            self._place()

    def end(self) -> None:
        """Listen no more."""
        self.is_active = self.is_waiting = False
        if self._is_placed:
            self._remove()

    def take(self) -> dict[str, Modes]:
        """The modes of each module in what was seen since the last call; empty for nothing."""
        found, self._found = self._found, {}
        taken: dict[str, Modes] = {}
        for step, modes in found.items():
            for name, is_training in modes.items():
                taken[name] = (*taken.get(name, ()), (step, is_training))
        return taken

    def see(self, model: nn.Module) -> None:
        """The model is called."""
        if model is not self._model():
            return
        if torch.is_grad_enabled():
            if not self._in_step:
                self._strays += 1
                self.is_waiting &= self._strays <= _MOST_STRAYS
                self._remove()
            return
        is_training = model.training
        is_known = self._step in self._found
        if self._is_done or (is_training and is_known):
            return
        self._seen += not is_known
        if self._seen >= _ENOUGH:
            self.is_waiting = False
        # Single modules in training mode in a model that is not are so on purpose.
        self._is_done = not is_training
        self._found[self._step] = {
            name: is_training and module.training
            for name, reference in self._modules
            if (module := reference()) is not None
        }
        if len(self._found) > _ENOUGH:
            del self._found[next(iter(self._found))]

    def _place(self) -> None:
        model = self._model()
        if model is None or self._is_placed or not self._modules:
            return
        if self._key is None:
            self._key = model.register_forward_pre_hook(self._hook).id
        else:
            # As registering it does, at a fraction of its price, with the key it had.
            model._forward_pre_hooks[self._key] = self._hook
        self._is_placed = self.is_active = True

    def _remove(self) -> None:
        self._is_placed = self._in_step = False
        model = self._model()
        if model is not None and self._key is not None:
            model._forward_pre_hooks.pop(self._key, None)


class _PassHook:
    """Hook of the model. A copy of it is inert."""

    __slots__ = ("_watch",)

    def __init__(self, watch: EvaluationWatch) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        if _is_compiling():
            return
        watch = self._watch()
        if watch is not None:
            watch.see(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()
