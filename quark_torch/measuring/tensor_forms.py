"""The forms that a tensor comes in, and how each is opened as plain strided memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Form(NamedTuple):
    """A tensor as dense parts.

    Attributes:
        parts: What to read: detached, strided, real or complex.
        element_count: Elements of the whole, stored or not.
        density: Stored elements over all, for a sparse tensor only.
        notes: As of `TensorStatistics`.
        has_units: Whether the one part has the dimensions of the tensor.
    """

    parts: tuple[Tensor, ...]
    element_count: int
    density: float | None = None
    notes: tuple[str, ...] = ()
    has_units: bool = True


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda _: False)
_tracing_state = getattr(torch._C, "_get_tracing_state", lambda: None)


def is_plain(tensor: object) -> bool:
    """True of a tensor whose memory may be read directly, as far as its class says."""
    return type(tensor) in _PLAIN and not _is_wrapped(tensor) and _tracing_state() is None


def open_form(tensor: Tensor) -> Form | None:
    """A tensor as dense parts, or None where it has no elements that could be read.

    Called without gradients.
    """
    if _tracing_state() is not None or _is_wrapped(tensor) or _is_hollow(tensor):
        return None
    if tensor.is_nested:
        return Form(
            tuple(part.detach() for part in tensor.unbind()),
            sum(part.numel() for part in tensor.unbind()),
            has_units=False,
        )
    if tensor.layout != torch.strided:
        return _open_sparse(tensor)
    if type(tensor) not in _PLAIN and hasattr(tensor, "to_local"):
        return _open_shard(tensor)
    if tensor.is_quantized:
        return Form((tensor.detach(),), tensor.numel(), notes=("quantized: of what it stands for",))
    notes = ("complex: of the magnitudes",) if tensor.dtype.is_complex else ()
    return Form((tensor.detach(),), tensor.numel(), notes=notes)


def _is_hollow(tensor: Tensor) -> bool:
    """True of tensors without elements: meta and fake ones, and those in transforms."""
    if tensor.is_meta:
        return True
    if type(tensor) in _PLAIN:
        # Freed memory, as of a sharded parameter that is not gathered.
        return bool(
            tensor.layout == torch.strided
            and tensor.numel()
            and not tensor.is_nested
            and tensor.data_ptr() == 0
            and not tensor._is_zerotensor()
        )
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def _open_sparse(tensor: Tensor) -> Form:
    tensor = tensor.detach()
    # Values of one place are its value together only once they are added up.
    values = (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()
    count = tensor.numel()
    notes = ["sparse: of the stored values"]
    if values.dtype.is_complex:
        notes.append("complex: of the magnitudes")
    return Form(
        (values,),
        count,
        density=values.numel() / count if count else 0.0,
        notes=tuple(notes),
        has_units=False,
    )


def _open_shard(tensor: Any) -> Form | None:
    """Open the part of a distributed tensor that this process holds; nothing is gathered."""
    placements = getattr(tensor, "placements", ())
    local = tensor.detach().to_local()
    if hasattr(local, "wait") and type(local) not in _PLAIN:
        local = local.wait()
    form = open_form(local)
    if form is None:
        return None
    if any(placement.is_partial() for placement in placements):
        note = "scope: local_partial"
    elif all(placement.is_replicate() for placement in placements):
        return form
    else:
        note = "scope: local_shard"
    return form._replace(notes=(*form.notes, note))


def without_repeats(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements of an expanded tensor once, and how often each of them is there."""
    repeats = 1
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            repeats *= size
            tensor = tensor.narrow(dim, 0, 1)
    return tensor, repeats


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the widest stride to the narrowest, if the memory has no gaps.

    None where elements overlap or lie apart.
    """
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if sizes[dim] == 1:
            continue
        if strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return tuple(order)


def walk(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """All elements as one-dimensional pieces; copies of at most so many, where they lie apart."""
    order = memory_order(tensor)
    if order is not None and not tensor.is_quantized and not (tensor.is_neg() or tensor.is_conj()):
        # In the order of the memory nothing is copied, whatever the format.
        yield tensor.permute(order).reshape(-1)
        return
    yield from _copies(tensor, limit)


def _copies(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    count = tensor.numel()
    if count <= limit:
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        yield tensor.resolve_conj().resolve_neg().reshape(-1)
        return
    dim = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    size = tensor.shape[dim]
    many = max(1, limit * size // count)
    for begin in range(0, size, many):
        yield from _copies(tensor.narrow(dim, begin, min(many, size - begin)), limit)
