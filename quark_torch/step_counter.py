"""Counts the steps of a loop that does not call `watch.step`, by those of its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quark_core.api import OpenRun, find_next_step
from quark_torch.parameters.diagnostics import ParameterDiagnostics
from quark_torch.parameters.listing import hold_parameters

# What has no use any more, and cannot leave PyTorch's hooks while it goes through them.
_left: list[Any] = []


class Watching(Protocol):
    """What has its steps counted, as far as that must know it: a `TrainingWatch`."""

    parameters: ParameterDiagnostics | None

    @property
    def optimizer(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that are followed now."""

    def close(self) -> None:
        """End everything."""


class StepCounter:
    """Begins and ends the steps of a watch where its optimizers step, until the loop does.

    A step of the loop ends with its optimizer's step. Of several optimizers it ends with the last
    of those that step in turn; where one steps more often than others, with that one's. So
    micro-batches are parts of a step, and one that a GradScaler leaves out is none.

    It holds its watch, which nobody else may, until the run ends or the loop counts by itself.

    Args:
        watch: The watch.
        turn: Called with the number of each step that begins, as the one before it ends.
        model: Its model, whose optimizers count where none was named.
        run: The run.
    """

    def __init__(
        self, watch: Watching, turn: Callable[[int], None], model: nn.Module, run: OpenRun
    ) -> None:
        self._watch: Watching | None = watch
        self._turn: Callable[[int], None] | None = turn
        self._model = weakref.ref(model)
        self._run = run
        self._number: int | None = None
        self._stepped: set[int] = set()
        self._lead: int | None = None
        self._totals: list[int] = []
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._is_asked = False
        _clear_left()
        self._handle = register_optimizer_step_post_hook(self._see)
        run.writers.add(self)

    def bind(self) -> None:
        """Nothing is bound to the run's stream."""

    def settle(self) -> None:
        """The run ends, and nobody may have closed the watch."""
        watch = self._watch
        if watch is not None:
            watch.close()

    def leave(self) -> bool:
        """Count no more; returns whether a step was begun."""
        if self._watch is not None:
            self._watch = self._turn = None
            _left.append(self._handle)
            if not self._is_asked:
                _clear_left()
        return self._number is not None

    def _see(self, optimizer: torch.optim.Optimizer, _arguments: Any, _keywords: Any) -> None:
        """An optimizer of the process has stepped."""
        watch, turn = self._watch, self._turn
        # A compiled step would be broken into pieces by it.
        if watch is None or turn is None or torch.compiler.is_compiling():
            return
        self._is_asked = True
        try:
            if self._run.is_over:
                self.leave()
            elif self._ends_step(watch, optimizer):
                number = find_next_step(self._run) if self._number is None else self._number
                self._number = number + 1
                turn(self._number)
        finally:
            self._is_asked = False

    def _ends_step(self, watch: Watching, optimizer: torch.optim.Optimizer) -> bool:
        named = watch.optimizer or tuple(one for one in self._known if self._known[one])
        totals = [] if watch.parameters is None else list(watch.parameters.step_totals)
        if totals:
            # Of a wrapper and what it wraps it is told there which step is the step.
            before = [*self._totals, *(0 for _ in totals)]
            self._totals = totals
            stepped = [one for one, *n in zip(named, totals, before, strict=False) if n[0] != n[1]]
            if not stepped:
                return False
            optimizer = stepped[0]
        elif optimizer not in named and (watch.optimizer or not self._is_own(optimizer)):
            return False
        own = {id(one) for one in (*named, optimizer)}
        key = id(optimizer)
        if self._lead is None or self._lead not in own:
            self._lead = None
            if len(own) == 1:
                return True
        if key == self._lead or key in self._stepped or self._stepped | {key} >= own:
            if key in self._stepped:
                # It does not wait for the others, and its first step was counted with none.
                self._lead, self._number = key, (self._number or 0) + (self._lead is None)
            self._stepped.clear()
            return True
        self._stepped.add(key)
        return False

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._known.get(optimizer)
        if known is None:
            model = self._model()
            own = set() if model is None else {id(each) for each in model.parameters()}
            known = self._known[optimizer] = not own.isdisjoint(hold_parameters(optimizer))
        return known


def _clear_left() -> None:
    while _left:
        _left.pop().remove()
