"""Rows of statistics that compiled code writes into buffers, and what is read of them.

The operations are those that a compiler fuses with what makes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from quark_torch.layers.autograd_frames import find_functions
from quark_torch.measuring.partials import TensorStatistics

ROWS = 16
"""Calls of a module in one step of which there are rows."""
SPARE = ROWS
"""The row after them, for what belongs to none of them."""
MAX_DIMS = 8
FIELDS = 13
"""Fields of a row before the sizes of the tensor."""
WIDTH = FIELDS + MAX_DIMS

_find_graph_task = torch._C._current_graph_task_id
_libraries: list[Any] = []


def summarize(
    tensor: Tensor,
    near_zero: float,
    saturation: tuple[float, float] | None,
    unit_dim: int | None,
) -> Tensor:
    """The statistics of a tensor as one row, made of operations that a compiler fuses.

    The moments are those around the mean, with totals in float64 where the
    device has it.
    """
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    values = tensor.detach()
    values = values.abs() if values.dtype.is_complex else values
    values = values if values.dtype == torch.float64 else values.to(torch.float32)
    finite = torch.isfinite(values)
    count = finite.sum()
    mean = torch.where(finite, values, 0.0).sum(dtype=wide) / count.clamp(min=1)
    centred = torch.where(finite, values - mean, 0.0)
    squares = (centred * centred).sum(dtype=wide)
    magnitudes = values.abs()
    zeros = (magnitudes <= near_zero).sum()
    none = torch.zeros((), dtype=wide, device=tensor.device)
    saturated, dead = none, none
    if saturation is not None:
        low, high = saturation
        saturated = (((values <= low) | (values >= high)) & finite).sum()
    units = 0
    if unit_dim is not None:
        units = tensor.shape[unit_dim]
        others = [dim for dim in range(tensor.dim()) if dim != unit_dim]
        dead = (magnitudes.amax(others) <= near_zero).sum()
    found = [
        none + 1.0,
        count,
        torch.isnan(values).sum(),
        torch.isinf(values).sum(),
        mean,
        squares,
        torch.where(finite, values, torch.inf).amin(),
        torch.where(finite, values, -torch.inf).amax(),
        zeros,
        saturated,
        dead,
        none + units,
        none + tensor.dim(),
        *(none + size for size in tensor.shape),
    ]
    found += [none] * (WIDTH - len(found))
    return torch.stack([value.to(wide) for value in found])


class _GradientTap(torch.autograd.Function):
    """Gives what it gets, and writes the statistics of the gradient into a row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        """Give a copy, which the compiler does without, and in-place modules may change."""
        # Not among the saved tensors, which a checkpoint makes again.
        ctx.rows, ctx.place = rows, place
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Write the row of the call that the gradient is of."""
        ctx.rows.data.index_put_((ctx.place,), summarize(gradient, 0.0, None, None))
        return gradient, None, None


def observe(
    tensor: Tensor,
    activations: Tensor,
    gradients: Tensor,
    calls: Tensor,
    near_zero: float,
    low: float | None,
    high: float,
    unit_dim: int | None,
    forward: bool,
    backward: bool,
    only_in_checkpoint: bool,
) -> Tensor:
    """Write the row of an activation, and have that of its gradient written.

    With `only_in_checkpoint` only where an autograd function runs it, as a
    reentrant checkpoint does.

    Compiled code that a checkpoint around it runs again writes into the spare
    row, since it cannot know which call it repeats.

    The compiler takes a call of it as it is into its graph, and looks into it
    only when it makes code of that: a backend that runs the graph as Python
    runs this too, also when a checkpoint does so again inside of backward.
    Buffers are changed behind the back of autograd, which would find fault
    with a checkpoint whose inputs change.
    """
    if _find_graph_task() != -1:
        if get_proxy_mode() is not None:
            gradients.data[SPARE].fill_(1.0)
        return tensor.clone() if backward else tensor
    if only_in_checkpoint and get_proxy_mode() is None and find_functions()[0] is None:
        return tensor
    # A checkpoint would count the call once more to have it, and get the row of another.
    with _kept_for_backward() as is_traced:
        place = calls.data.clamp(max=ROWS - 1)
        if is_traced:
            again = torch.ops.quark.runs_again(calls.data, only_in_checkpoint)
            place = torch.where(again, SPARE, place)
    if forward:
        saturation = None if low is None else (low, high)
        row = summarize(tensor, near_zero, saturation, unit_dim)
        activations.data.index_put_((place,), row)
    calls.data.add_(~again if is_traced else 1)
    if not backward:
        return tensor
    taken: Tensor = _GradientTap.apply(tensor, gradients, place)  # type: ignore[no-untyped-call]
    return taken


@cache
def register_operator() -> None:
    """Make the operator known by which compiled code is told that it runs once more.

    Of code for a whole graph nothing of Python is left, so that a checkpoint
    around it, which runs it a second time inside of backward, shows by this only.
    """
    # Not when this is imported, since it loads the compiler.
    torch.compiler.allow_in_graph(observe)  # type: ignore[no-untyped-call]
    library: Any = torch.library.Library("quark", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("runs_again(Tensor calls, bool only_in_checkpoint) -> Tensor")
    library.impl("runs_again", _runs_again, "CompositeExplicitAutograd")
    library.impl("runs_again", _make_meta, "Meta")
    _libraries.append(library)


def _runs_again(calls: Tensor, only_in_checkpoint: bool) -> Tensor:
    is_spare = _find_graph_task() != -1 or (only_in_checkpoint and find_functions()[0] is None)
    return torch.full_like(calls, is_spare, dtype=torch.bool)


def _make_meta(calls: Tensor, only_in_checkpoint: bool) -> Tensor:  # noqa: ARG001 - the operator's
    return torch.empty_like(calls, dtype=torch.bool)


@contextmanager
def _kept_for_backward() -> Iterator[bool]:
    """What compiled code makes in here is kept for its backward, and not made a second time.

    Yields whether code is being made.
    """
    tracing = get_proxy_mode()
    if tracing is None:
        yield False
        return
    graph = tracing.tracer.graph
    before = len(graph.nodes)
    yield True
    for node in islice(reversed(graph.nodes), len(graph.nodes) - before):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def read_row(row: list[float], *, has_saturation: bool) -> TensorStatistics:
    """The statistics that a row holds."""
    counts = [int(number) for number in row[1:4]]
    finite, nans, infinite = counts
    mean, squares = row[4], row[5]
    units = int(row[11])
    return TensorStatistics(
        element_count=finite + nans + infinite,
        finite_count=finite,
        nan_count=nans,
        inf_count=infinite,
        mean=mean if finite else None,
        variance=squares / finite if finite else None,
        norm=(squares + finite * mean * mean) ** 0.5 if finite else None,
        minimum=row[6] if finite else None,
        maximum=row[7] if finite else None,
        near_zero_count=int(row[8]),
        saturated_count=int(row[9]) if has_saturation else None,
        unit_count=units or None,
        dead_unit_count=int(row[10]) if units else None,
    )
