"""What made a tensor, by the autograd graph behind it.

A graph is followed back through what keeps the places of elements, or moves
them as it says, to the operation of a layer, which has its units (channels or
features) in a known dimension.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, Final, Literal

from torch import Tensor

LOST: Final = -1
"""The units of a layer are no dimension any more: a view has taken them apart."""

_MAX_OPERATIONS = 48
_NAME = re.compile(r"(\w+?)Backward\d*")
_Role = Literal["channels", "features", "keeps", "normalizes", "views", "permutes", "other"]

_CHANNELS = re.compile(r".*(Conv|BatchNorm|GroupNorm).*")
_FEATURES = frozenset(
    """
    Addmm Mm Linear MkldnnLinear ScaledMm Embedding EmbeddingBag MkldnnRnnLayer CudnnRnn
    MiopenRnn
    """.split()
)
# Element for element, or along dimensions that stay where they are.
_KEEPS = frozenset(
    """
    Relu Threshold LeakyRelu RreluWithNoise PreluKernel Elu Gelu Silu Mish Sigmoid
    LogSigmoid Tanh Hardtanh Hardswish Hardsigmoid Softplus Softshrink Hardshrink Softmax
    LogSoftmax Glu NativeDropout FusedDropout Add Sub Rsub Mul Div Neg Pow Exp Expm1 Log
    Log1P Abs Sqrt Rsqrt Sin Cos Erf Atan Sign Clamp ClampMin ClampMax Maximum Minimum Where
    MaskedFill Lerp Addcmul Addcdiv NanToNum ToCopy Clone Alias Copy Cat Slice Split
    SplitWithSizes Flip Roll ConstantPadNd MulScalar FusedRmsNorm Cumsum
    BackwardHookFunction _ToTorchTensor _FromTorchTensor RegisterPostBackwardFunction
    """.split()
)
_SPATIAL = re.compile(r".*(Pool[123]D|Pool[23]DWithIndices|Upsample|Pad[123]D).*")
_NORMALIZES = frozenset(("NativeLayerNorm", "LayerNorm"))
_VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias", "_ReshapeAlias", "Squeeze", "Unsqueeze"))
_PERMUTES = frozenset(("Permute", "Transpose"))


def trace_units(tensor: Tensor) -> int | None:
    """The dimension of the units that a tensor has from the layer behind it.

    Returns:
        It; `LOST` where the layer's units are no dimension of the tensor; None
        where the graph does not lead to a layer, or there is none.
    """
    function = tensor.grad_fn
    if function is None:
        return None
    return _search(function, tensor.shape, [_MAX_OPERATIONS])


def trace_scope(tensor: Tensor) -> str | None:
    """Which part of a distributed tensor a plain one is, that was taken of it with `to_local`.

    As tensor parallelism does with what its layers give; what is made of such
    a part, element for element or by views, is a part too.

    Returns:
        `local_shard`, `local_partial`, or None where it is all of it, or no
        part of anything.
    """
    waiting: list[Any] = [tensor.grad_fn]
    for _ in range(_MAX_OPERATIONS):
        if not waiting:
            return None
        function = waiting.pop()
        if function is None:
            continue
        name = type(function).__name__
        if name.startswith("_ToTorchTensor"):
            placements = function.dtensor_spec.placements
            if any(placement.is_partial() for placement in placements):
                return "local_partial"
            if all(placement.is_replicate() for placement in placements):
                return None
            return "local_shard"
        if name.startswith("_FromTorchTensor") or _find_role(name) in ("channels", "features"):
            continue
        waiting += [earlier for earlier, _ in reversed(function.next_functions)]
    return None


def _search(function: Any, shape: Sequence[int], left: list[int]) -> int | None:
    """As `trace_units`, of what a function gave in a shape; `left` counts down."""
    while function is not None and left[0] > 0:
        left[0] -= 1
        role = _find_role(type(function).__name__)
        if role == "keeps":
            inputs = function.next_functions
            # The first one that leads to a layer: a mask, a constant or a parameter does not.
            for earlier, _ in inputs[:-1]:
                found = _search(earlier, shape, left)
                if found is not None:
                    return found
            function = inputs[-1][0] if inputs else None
            continue
        if role == "channels":
            return 1 if len(shape) > 1 else LOST
        if role == "features":
            return len(shape) - 1
        if role == "normalizes":
            found = _search(function.next_functions[0][0], shape, left)
            return len(shape) - 1 if found is None else found
        if role == "views":
            inner = _find_sizes(function, shape)
            return _carry(_search(function.next_functions[0][0], inner, left), inner, shape)
        if role == "permutes":
            order = _find_order(function, len(shape))
            earlier_shape = [0] * len(shape)
            for place, source in enumerate(order):
                earlier_shape[source] = shape[place]
            found = _search(function.next_functions[0][0], earlier_shape, left)
            return found if found is None or found < 0 else order.index(found)
        return None
    return None


def _find_sizes(function: Any, shape: Sequence[int]) -> Sequence[int]:
    """The sizes of what a view was taken of, which has those of `shape`."""
    if type(function).__name__.startswith("Unsqueeze"):
        dim = _to_signed(function._saved_dim) % len(shape)
        return [*shape[:dim], *shape[dim + 1 :]]
    return tuple(function._saved_self_sym_sizes)


def _carry(place: int | None, inner: Sequence[int], outer: Sequence[int]) -> int | None:
    """Where a dimension is after a view, which keeps the order of the elements."""
    if place is None or place < 0:
        return place
    before, size = prod(inner[:place]), inner[place]
    for dim, other in enumerate(outer):
        if other == size and prod(outer[:dim]) == before:
            return dim
    return LOST


def _find_order(function: Any, dims: int) -> list[int]:
    """Of each dimension the one that it was before."""
    order = list(range(dims))
    if type(function).__name__.startswith("Permute"):
        return [_to_signed(dim) % dims for dim in function._saved_dims]
    first, second = (_to_signed(dim) % dims for dim in (function._saved_dim0, function._saved_dim1))
    order[first], order[second] = second, first
    return order


def _to_signed(number: int) -> int:
    # Autograd gives negative dimensions as unsigned numbers of 64 bits.
    return number - (1 << 64) if number >= 1 << 63 else number


@cache
def _find_role(function_name: str) -> _Role:
    match = _NAME.fullmatch(function_name)
    if match is None:
        return "other"
    name = match[1]
    if name in _KEEPS or _SPATIAL.fullmatch(name):
        return "keeps"
    for role, names in (
        ("features", _FEATURES),
        ("views", _VIEWS),
        ("permutes", _PERMUTES),
        ("normalizes", _NORMALIZES),
    ):
        if name in names:
            return role  # type: ignore[return-value]
    return "channels" if _CHANNELS.fullmatch(name) else "other"
