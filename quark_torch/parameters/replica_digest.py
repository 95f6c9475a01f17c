"""What the bits of parameters add up to, so that replicas can be held against each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quark_core.api import OpenRun, parse_ranks

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_replicas(run: OpenRun) -> bool:
    """Whether other ranks of a launch write to the run as well."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    ranks = run.context.ranks
    if ranks is None or torch.distributed.get_world_size() < 2:
        return False
    return not parse_ranks(ranks, "ranks").is_one


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[str | None]:
    """A digest of each, the same for the same bits in whatever order they are added up.

    Called without gradients; each device is waited for once. None for what
    has no bits to be read.
    """
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        total = _add_up(tensor)
        if total is not None:
            sums.setdefault(tensor.device, []).append((place, total))
    out: list[str | None] = [None] * len(tensors)
    for found in sums.values():
        totals = torch.stack([total for _, total in found]).tolist()
        for (place, _), total in zip(found, totals, strict=True):
            out[place] = f"{total % 2**64:016x}"
    return out


def _add_up(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
    # Adding whole numbers wraps around and knows no rounding.
    return plain.view(_WORDS[plain.element_size()]).sum(dtype=torch.int64)
