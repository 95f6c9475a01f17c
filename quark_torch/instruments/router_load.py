"""The load of an expert router: tokens per expert, entropy, dropped tokens."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quark_core.api import SchemaValidationError, check_index, to_float
from quark_torch.instruments.instrument import Choice, Instrument, Measured, make_choice
from quark_torch.layer_filter import name_modules

_USUAL = r"(^|\.)(router|gate|gating|switch)$"
_TOP_K = ("top_k", "topk", "num_experts_per_tok", "num_selected_experts", "moe_top_k", "k")
_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_routed")


class Routing(NamedTuple):
    """Decisions of a router for some tokens.

    Attributes:
        logits: Float tensor of shape `[..., experts]`, or None.
        experts: Integer tensor of shape `[..., k]` with the chosen experts, or None. A negative
            index is a dropped slot.
    """

    logits: Tensor | None
    experts: Tensor | None


class RouterLoad(Instrument):
    """Collector of the load of a router's experts, for `quark.watch(extras=[…])`.

    In sampled steps, each router gets these metrics under `router/MODULE`:

    - `load/0`, `load/1` …: share of the routed slots per expert. The shares add up to 1.
    - `load_entropy`: normalized entropy of these shares. 1 is uniform, 0 is one expert.
    - `load_max`: largest share divided by the uniform share.
    - `idle`: share of experts without a slot.
    - `token_entropy`: mean normalized entropy of the router's probabilities, if there are logits.
    - `dropped`: share of slots over capacity or marked as dropped, if known.

    Padding tokens are included. A router may return logits (`[..., experts]`, of which the `top_k`
    largest are used), the indexes of the chosen experts, or a tuple of both.

    Args:
        modules: Modules that are routers: a regular expression to search for in the name, or a
            function of name and module. Defaults to modules named router, gate, gating or switch.
        top_k: Experts per token. Defaults to `top_k` or `num_experts_per_tok` of the module or its
            parent, else 1.
        experts: Number of experts. Defaults to the last dimension of the logits, or `num_experts`
            of the module or its parent.
        capacity_factor: Capacity of an expert as a multiple of its uniform share. Slots over
            capacity count as dropped.
        read: Function that turns the output of a router into a `Routing`, a tensor or a tuple of
            tensors.
        name: Prefix of the metrics. Defaults to "router".

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    def __init__(
        self,
        modules: Choice | None = None,
        *,
        top_k: int | None = None,
        experts: int | None = None,
        capacity_factor: float | None = None,
        read: Callable[[Any], Any] | None = None,
        name: str = "router",
    ) -> None:
        self.name = name
        self._choose = make_choice(modules, _USUAL)
        self._top_k = check_index(top_k, "top_k")
        self._experts = check_index(experts, "experts")
        if self._top_k == 0 or self._experts == 0:
            raise SchemaValidationError("top_k and experts must be positive")
        self._capacity_factor = None
        if capacity_factor is not None:
            self._capacity_factor = to_float(capacity_factor, "capacity_factor", "RouterLoad")
            if not 0 < self._capacity_factor < math.inf:
                raise SchemaValidationError("capacity_factor must be a finite number above 0")
        self._read = read
        self._holders: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()

    def attach(self, model: nn.Module) -> None:
        """Record the parents of modules, which often know the number of experts per token."""
        for place in name_modules(model):
            for child in place.module.children():
                self._holders[child] = place.module

    def select(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is a router."""
        return bool(self._choose(name, module))

    def measure(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],  # noqa: ARG002 - part of the protocol
        kwargs: Mapping[str, Any],  # noqa: ARG002
        output: Any,
    ) -> Measured | None:
        """Return the loads and entropies of one call."""
        logits, chosen = _find_routing(output if self._read is None else self._read(output))
        if logits is None and chosen is None:
            return None
        was_given = chosen is not None
        experts = self._count_experts(name, module, logits)
        found: dict[str, Tensor | float] = {}
        if logits is not None:
            flat = logits.detach().reshape(-1, logits.shape[-1]).float()
            if not flat.shape[0]:
                return None
            found["token_entropy"] = _measure_entropy(torch.softmax(flat, -1)).mean()
            if chosen is None:
                k = min(self._top_k or self._ask(module, _TOP_K) or 1, experts)
                chosen = flat.topk(k, dim=-1).indices
        assert chosen is not None
        slots = chosen.detach().reshape(-1).long()
        if not slots.numel():
            return None
        # A slot of no expert is counted in a bin of its own.
        places = torch.where((slots < 0) | (slots >= experts), experts, slots)
        counts = torch.zeros(experts + 1, device=slots.device, dtype=torch.float32)
        counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.float32))
        counts, lost = counts[:-1], counts[-1]
        share = counts / counts.sum().clamp(min=1.0)
        found |= {
            "load": share,
            "load_entropy": _measure_entropy(share),
            "load_max": share.max() * experts,
            "idle": (counts == 0).float().mean(),
        }
        if self._capacity_factor is not None:
            capacity = math.ceil(self._capacity_factor * slots.numel() / experts)
            lost = lost + (counts - capacity).clamp(min=0.0).sum()
            found["dropped"] = lost / slots.numel()
        elif was_given:
            found["dropped"] = lost / slots.numel()
        return found

    def explain_silence(self) -> str:
        """Return the required output of a router."""
        return (
            "the routers returned neither logits nor expert indexes. Convert their output to a "
            "quark.Routing with RouterLoad(read=…)"
        )

    def _count_experts(self, name: str, module: nn.Module, logits: Tensor | None) -> int:
        if self._experts is not None:
            return self._experts
        if logits is not None:
            return int(logits.shape[-1])
        found = self._ask(module, _EXPERTS)
        if found is None:
            raise ValueError(
                f"the number of experts of {name} cannot be inferred from indexes. Pass "
                "RouterLoad(experts=…)"
            )
        return found

    def _ask(self, module: nn.Module, names: tuple[str, ...]) -> int | None:
        """A number that the module has, or the one that holds it, or its configuration."""
        holder = self._holders.get(module)
        for owner in (module, holder, getattr(holder, "config", None)):
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None


def _measure_entropy(share: Tensor) -> Tensor:
    """Entropy of the last dimension over that of an even one, from 0 to 1."""
    size = share.shape[-1]
    if size < 2:
        return torch.zeros(share.shape[:-1], device=share.device)
    entropy: Tensor = torch.special.entr(share).sum(-1)
    return entropy / math.log(size)


def _find_routing(given: Any) -> Routing:
    """Logits and indexes of whatever a router gives."""
    if isinstance(given, Routing):
        return given
    parts = list(given.values()) if isinstance(given, Mapping) else given
    tensors = [
        one for one in (parts if isinstance(parts, (list, tuple)) else [parts])
        if isinstance(one, Tensor) and one.ndim > 0
    ]  # fmt: skip
    chosen = next(
        (one for one in tensors if not one.is_floating_point() and one.dtype != torch.bool), None
    )
    floats = [one for one in tensors if one.is_floating_point() and one.ndim > 1]
    # Beside the logits stand weights of the chosen experts, which are fewer.
    logits = max(floats, key=lambda one: one.shape[-1], default=None)
    if logits is not None and chosen is not None and logits.shape[-1] <= chosen.shape[-1]:
        logits = None
    return Routing(logits, chosen)
