"""Counts losses and gradients that are not finite, which a framework may filter out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from quark_torch.parameters.listing import take_local


class NonFiniteWindow(NamedTuple):
    """What was seen since the last window, in this process."""

    losses: int
    bad_losses: int
    gradients: int
    bad_gradients: int


class NonFiniteCount:
    """Counts on the device, and waits for it only where a window is taken."""

    def __init__(self) -> None:
        self._seen = [0, 0]
        # Of losses and of gradients: device -> how many were bad, on that device.
        self._bad: list[dict[torch.device, torch.Tensor]] = [{}, {}]

    def note_loss(self, output: object) -> None:
        """A forward pass has ended with this: a loss, or what has one as a model gives it."""
        loss = _find_loss(output)
        if loss is not None:
            self._note(0, ~loss.detach().isfinite().all())

    def note_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """An optimizer is about to step on these; of sharded ones the local part is looked at."""
        alike: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                continue
            local = take_local(parameter.grad)[0].detach()
            if local.numel():
                alike.setdefault(local.device, []).append(local)
        flags = [
            # The largest element overflows in no number format, as another norm may.
            ~torch.stack([norm.float() for norm in torch._foreach_norm(group, torch.inf)])
            .isfinite()
            .all()
            for group in alike.values()
        ]
        if flags:
            self._note(1, torch.stack([flag.to(flags[0].device) for flag in flags]).any())

    def take(self) -> NonFiniteWindow:
        """What was seen since the last call."""
        seen, self._seen = self._seen, [0, 0]
        bad, self._bad = self._bad, [{}, {}]
        found = [sum(int(count.item()) for count in each.values()) for each in bad]
        return NonFiniteWindow(seen[0], found[0], seen[1], found[1])

    def _note(self, kind: int, is_bad: torch.Tensor) -> None:
        self._seen[kind] += 1
        bad, one = self._bad[kind], is_bad.long()
        known = bad.get(one.device)
        bad[one.device] = one if known is None else known + one


def _find_loss(output: Any) -> torch.Tensor | None:
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
        if isinstance(output, torch.Tensor) and output.ndim:
            return None  # logits, of a model that works out no loss
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "loss", None)
    is_loss = isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel()
    return take_local(output)[0] if is_loss else None
