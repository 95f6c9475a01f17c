"""The gradients that are there now: how many micro-batches they sum up, and how they are scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch

from quark_torch.parameters.listing import ParameterList

_SAMPLED = 256
_MORE_WATCHED = 3  # parameters of an optimizer, from its first on, beside the one that counts


class _Count:
    """Called when a gradient has come to one parameter; holds it only weakly.

    Autograd adds in place to a gradient that is there, which its version
    tells from one that is new: one that an optimizer's step has used and that
    is added to all the same was not cleared. What else changes gradients in place makes the
    number unknown, except where it comes before the first one, when it is
    taken for `zero_grad(set_to_none=False)`.
    """

    __slots__ = (
        "_handle", "_is_carried", "_is_first", "_is_used", "_parameter", "_total", "_used",
        "_version", "number",
    )  # fmt: skip

    def __init__(self, parameter: torch.Tensor, total: int | None, *, has_stepped: bool) -> None:
        self.number: int | None = None
        # Whether the gradient that is there was used by a step, and then added to.
        self._is_used = self._is_carried = False
        self._used: torch.Tensor | None = None
        self._total: int | None = None
        self._version = -1
        self._parameter = weakref.ref(parameter)
        self._handle: Any = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            self
        )
        self.begin(total, has_stepped=has_stepped)

    def begin(self, total: int | None, *, has_stepped: bool) -> None:
        """Another step begins: go on from the gradient that is there.

        Args:
            total: How many steps the optimizer has made; None where it is not known.
            has_stepped: Whether it made one in the loop's step that has ended.
        """
        self._is_first = True
        is_news = self._total is None or total != self._total
        self._total = total
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            self.number, self._version = 0, -1
            self._forget_used()
        elif gradient.is_inference():
            self.number = None
        else:
            # It may have been clipped since the last one came, or set to zero.
            if gradient._version != self._version:
                self.number = None
            self._version = gradient._version
            if has_stepped and is_news and gradient.layout is torch.strided:
                self._is_used = True
                # It may have been set to zero, which a look at it would wait for a device to say.
                self._used = _take_sample(gradient)

    @property
    def is_carried_over(self) -> bool:
        """Whether the gradient still holds what a step of the optimizer has used; waits for it."""
        used = self._used
        return self._is_carried and used is not None and bool(used.any())

    def _forget_used(self) -> None:
        self._is_used = self._is_carried = False
        self._used = None

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient, is_first = parameter.grad, self._is_first
        self._is_first = False
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            self.number = None
            self._forget_used()
            return
        version, known = gradient._version, self._version
        self._version = version
        if version <= known:
            self.number = 1
            self._forget_used()
        elif version == known + 1:
            self.number = None if self.number is None else self.number + 1
            self._is_carried |= self._is_used
        else:
            self.number = 1 if is_first else None
            self._forget_used()

    @property
    def identity(self) -> int:
        """The `id` of its parameter; -1 where that is gone."""
        parameter = self._parameter()
        return -1 if parameter is None else id(parameter)

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it counts by this parameter."""
        return self._parameter() is parameter

    def remove(self) -> None:
        """Take the hook off the parameter."""
        self._handle.remove()


class MicroBatches:
    """Counts the backward passes of a step by one parameter of each optimizer.

    A few more of each, from its first parameter on, tell of gradients that are cleared in a part
    of the model only. The hooks are there only while they are wanted.

    Args:
        optimizers: The optimizers, as they are when it is looked; without one the index is -1.
        parameters: The model's.
        on_failure: Told of an exception, with the name of what went wrong.
        find_steps: Of an optimizer's index, how many steps it has made (None where that is
            not known), and whether one of them in the loop's step that has ended.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: ParameterList,
        on_failure: Callable[[str, Exception], None],
        find_steps: Callable[[int], tuple[int | None, bool]],
    ) -> None:
        self._optimizers = optimizers
        self._find_steps = find_steps
        self._parameters = parameters
        self._on_failure = on_failure
        # By optimizer and place: the one that counts has place 0.
        self._counts: dict[tuple[int, int], _Count] = {}

    def begin(self) -> None:
        """Count from now on."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - training must go on
            self.end()
            self._on_failure("micro_batches_uncounted", error)

    def _begin(self) -> None:
        chosen: dict[tuple[int, int], torch.Tensor] = {}
        held_by = {
            index: [each for group in optimizer.param_groups for each in group["params"]]
            for index, optimizer in enumerate(self._optimizers)
        } or {-1: [listed.parameter for listed in self._parameters.known]}
        for index, held in held_by.items():
            known = [each for each in held if index < 0 or self._parameters.has(each)]
            chosen |= {(index, place): each for place, each in enumerate(_choose(known))}
        for key in self._counts.keys() - chosen.keys():
            self._counts.pop(key).remove()
        paces = {index: self._find_steps(index) for index in held_by}
        for key, parameter in chosen.items():
            count = self._counts.get(key)
            total, has_stepped = paces[key[0]]
            if count is not None and count.is_of(parameter):
                count.begin(total, has_stepped=has_stepped)
                continue
            if count is not None:
                self._counts.pop(key).remove()
            self._counts[key] = _Count(parameter, total, has_stepped=has_stepped)

    def end(self) -> None:
        """Count no more."""
        if self._counts:
            for count in self._counts.values():
                count.remove()
            self._counts.clear()

    def find_carried(self, index: int) -> frozenset[int] | None:
        """Which gradients of an optimizer still hold what an earlier step of it has used.

        Returns:
            The `id` of each such parameter among those that are watched; None for all
            parameters of the optimizer, where the one that counts is among them.
        """
        main = self._counts.get((index, 0))
        if main is not None and main.is_carried_over:
            return None
        watched = [count for (owner, _), count in self._counts.items() if owner == index]
        return frozenset(
            count.identity for count in watched if count is not main and count.is_carried_over
        )

    def find(self, index: int) -> int | None:
        """How many micro-batches an optimizer's gradients sum up; None where it is not known."""
        count = self._counts.get((index, 0))
        return None if count is None or not count.number else count.number


def _choose(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The trained ones to watch, the one that counts first; none where nothing is trained.

    That is the last one: what is near the loss gets a gradient once in a backward pass.
    """
    trained = [each for each in parameters if each.requires_grad and each.is_leaf]
    if not trained:
        return []
    backwards = reversed(trained)
    main = next((each for each in backwards if each.grad is not None), trained[-1])
    places = [len(trained) * part // _MORE_WATCHED for part in range(_MORE_WATCHED)]
    others = {id(trained[place]): trained[place] for place in places}
    return [main, *(each for each in others.values() if each is not main)]


class GradientScale:
    """Follows a GradScaler from one snapshot to the next.

    Args:
        scaler: A GradScaler, a function that returns its scale, or None.
        optimizers: The optimizers, as they are when it is looked.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.follow(scaler)

    def follow(self, scaler: Any) -> None:
        """Take this scaler from now on."""
        self._scaler = scaler
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


def _take_sample(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of some elements of a gradient, evenly spaced."""
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].clone()
