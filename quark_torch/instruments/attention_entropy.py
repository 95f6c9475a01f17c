"""The entropy of attention, for modules that return their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quark_core.api import SchemaValidationError
from quark_torch.instruments.instrument import Choice, Instrument, Measured, make_choice

_USUAL = "Attention"
# So many weights are looked at in one call; of more, evenly spaced queries.
_MOST_WEIGHTS = 4_194_304
_LOOKED_AT = 64
_LEAST_SUM, _MOST_SUM = 0.5, 2.0
# Positional arguments of nn.MultiheadAttention from need_weights on.
_NEED_WEIGHTS_AT = 4


class AttentionEntropy(Instrument):
    """Collector of the entropy of attention, for `quark.watch(extras=[…])`.

    In sampled steps, each attention module gets these metrics under `attention/MODULE`:

    - `entropy`: mean over queries and heads, in nats. 0 means attention to one key.
    - `entropy_share`: entropy divided by the logarithm of the number of visible keys. 1 is uniform.
    - `head/0`, `head/1` …: entropy of each head, if weights are given per head.

    The weights come from the module's output: `nn.MultiheadAttention` with `need_weights=True`, or
    Transformers models with `output_attentions=True` and `attn_implementation="eager"`. After
    dropout, the remaining weights are used. Fused kernels (flash, SDPA) do not return weights; this
    is logged once.

    Args:
        modules: Modules to measure: a regular expression to search for in the name, or a function
            of name and module. Defaults to the innermost modules with Attention in their class
            name.
        ask_for_weights: Whether `nn.MultiheadAttention` computes its weights in sampled steps, if
            the model does not ask for them. It does not use a fused kernel in these steps, so
            results may differ by rounding. Defaults to False.
        name: Prefix of the metrics. Defaults to "attention".

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    def __init__(
        self,
        modules: Choice | None = None,
        *,
        ask_for_weights: bool = False,
        name: str = "attention",
    ) -> None:
        if not isinstance(ask_for_weights, bool):
            raise SchemaValidationError("ask_for_weights must be True or False")
        self.name = name
        self._choose = None if modules is None else make_choice(modules, "")
        self._asks = ask_for_weights

    def select(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is an attention module."""
        if self._choose is not None:
            return bool(self._choose(name, module))
        if _USUAL not in type(module).__name__:
            return False
        return not any(_USUAL in type(inner).__name__ for inner in list(module.modules())[1:])

    def prepare(
        self,
        name: str,  # noqa: ARG002 - part of the protocol
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any] | None:
        """Request attention weights if the model does not."""
        if not self._asks or not isinstance(module, nn.MultiheadAttention):
            return None
        if len(args) > _NEED_WEIGHTS_AT or kwargs.get("need_weights", True):
            return None
        return {**kwargs, "need_weights": True, "average_attn_weights": False}

    def measure(
        self,
        name: str,  # noqa: ARG002 - part of the protocol
        module: nn.Module,  # noqa: ARG002
        args: tuple[Any, ...],  # noqa: ARG002
        kwargs: Mapping[str, Any],  # noqa: ARG002
        output: Any,
    ) -> Measured | None:
        """Return the entropies of one call."""
        weights = _find_weights(output)
        if weights is None:
            return None
        has_heads = weights.ndim == 4
        shaped = (
            weights.detach() if has_heads else weights.detach().reshape(-1, 1, *weights.shape[-2:])
        )
        shaped = _thin_out(shaped).float()
        # Where dropout has taken from them, of what it has left.
        shaped = shaped / shaped.sum(-1, keepdim=True)
        entropy = torch.special.entr(shaped).sum(-1)
        seen = (shaped > 0).sum(-1)
        # Of a query that may see nothing, such as padding, there is nothing to say.
        counts = torch.isfinite(entropy) & (seen > 0)
        entropy = torch.where(counts, entropy, 0.0)
        most = torch.log(seen.clamp(min=2).float())
        total = counts.sum().clamp(min=1)
        found: dict[str, Tensor | float] = {
            "entropy": entropy.sum() / total,
            "entropy_share": torch.where(seen > 1, entropy / most, 0.0).sum() / total,
        }
        if has_heads:
            heads = counts.sum((0, 2)).clamp(min=1)
            found["head"] = entropy.sum((0, 2)) / heads
        return found

    def explain_silence(self) -> str:
        """Return where attention weights come from."""
        return (
            "the modules returned no attention weights. Fused kernels (flash, SDPA) do not "
            "compute them. For nn.MultiheadAttention, pass need_weights=True or "
            "AttentionEntropy(ask_for_weights=True). For Transformers, pass "
            'output_attentions=True and attn_implementation="eager"'
        )


def _find_weights(output: Any) -> Tensor | None:
    """Weights [batch, heads, queries, keys] or [batch, queries, keys] that a module gave."""
    given = getattr(output, "attentions", None)
    parts: list[Any] = [given] if isinstance(given, Tensor) else []
    if isinstance(output, (tuple, list)):
        parts += output[1:]
    for part in parts:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            continue
        if part.ndim in (2, 3, 4) and part.numel() and _is_spread(part):
            return part if part.ndim > 2 else part[None]
    return None


def _is_spread(weights: Tensor) -> bool:
    """Whether the first queries' weights are shares, as nothing else that is given is."""
    rows = weights.detach().reshape(-1, weights.shape[-1])[:_LOOKED_AT].float()
    sums = rows.sum(-1)
    # Rows of padding are 0 or NaN; dropout takes from weights and scales the rest.
    sums = sums[torch.isfinite(sums) & (sums != 0)]
    if not sums.numel() or bool((rows < 0).any()):
        return False
    return _LEAST_SUM < float(sums.median()) < _MOST_SUM


def _thin_out(weights: Tensor) -> Tensor:
    """Evenly spaced queries, so that no more weights are looked at than the bound allows."""
    count = weights.numel()
    if count <= _MOST_WEIGHTS:
        return weights
    stride = math.ceil(count / _MOST_WEIGHTS)
    queries = weights[:, :, ::stride]
    # Few queries of a large batch: some of the batch then.
    return queries[:: max(1, math.ceil(queries.numel() / _MOST_WEIGHTS))]
