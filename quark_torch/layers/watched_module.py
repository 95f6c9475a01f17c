"""One module that is sampled: its range, where its units are, and what made its output."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import prod
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quark_torch.layer_filter import SelectedModule, describe_type, name_modules
from quark_torch.measuring.tensor_reading import pack_limits
from quark_torch.measuring.tensor_statistics import Wanted

_MAX_FRAMES = 400


def find_functions() -> tuple[object | None, object | None]:
    """The autograd functions around the caller.

    Returns:
        The outermost one whose forward runs, up to the nearest one whose
        backward runs; and that one.
    """
    inner: object | None = None
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            function = frame.f_locals.get("ctx")
            if code.co_name == "backward":
                return inner, function
            inner = function
        if frame.f_back is None:
            break
        frame = frame.f_back
    return inner, None


# What made a tensor, by the autograd graph behind it.
#
# A graph is followed back through what keeps the places of elements, or moves
# them as it says, to the operation of a layer, which has its units (channels or
# features) in a known dimension.

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


# What is to be known of a module to read its output: its range and where its units are.
#
# Units are channels or features. Convolutions and what belongs to them have them
# in dimension 1; linear layers, embeddings, layer norms, attention and recurrent
# layers in the last one. Any other module, such as an activation function, has
# those of what was given to it: of the layer that made it, by the autograd
# graph. Where the graph does not say (without gradients, in compiled code), they
# are those of the layer before it in its `nn.Sequential`, else those that the
# sizes fit: dimension 1 where a convolution of the model has so many channels,
# the last one where a linear layer has so many features, none where both do.
# Where nothing is known it is dimension 1 of a tensor of four dimensions or
# more, else the last one.

_log = logging.getLogger("quark.torch")

_TRAITS_CHANNELS = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_TRAITS_FEATURES = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
_DIMENSIONS = re.compile(r".*([123])d")
_RANGES = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Softmax2d": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "ReLU6": (0.0, 6.0),
}
_INACTIVE_AT_ZERO = ("ReLU6", "Hardtanh")


class Layout(NamedTuple):
    """Where the units of a layer's output are.

    Attributes:
        kind: channels for dimension 1, features for the last one.
        dims: The only number of dimensions for which that holds; 0 for any.
            A convolution takes one unbatched image too, which has one less.
    """

    kind: Literal["channels", "features"]
    dims: int = 0

    def find_dim(self, dims: int) -> int | None:
        """The dimension of the units of a tensor of so many dimensions."""
        if self.dims and dims != self.dims:
            return None
        return 1 if self.kind == "channels" else dims - 1


@dataclass(slots=True)
class _Sizes:
    """How many channels (by number of dimensions, 0 for any) and features a model's layers give."""

    channels: set[tuple[int, int]] = field(default_factory=set)
    features: set[int] = field(default_factory=set)

    @property
    def has_sequences(self) -> bool:
        """Whether an unbatched tensor of channels has two dimensions."""
        return any(dims == 3 for dims, _ in self.channels)

    def has_channels(self, dims: int, size: int) -> bool:
        return (dims, size) in self.channels or (0, size) in self.channels


@dataclass(frozen=True, slots=True)
class UnitRule:
    """Where the output of one module has its units.

    Attributes:
        layout: That of the module, or of the layer known to come before it; or None.
        is_own: Whether it is the module's.
        is_plain: Whether a tensor of two dimensions has samples and units; an
            unbatched sequence has channels and places instead.
    """

    layout: Layout | None
    is_own: bool
    is_plain: bool
    _sizes: _Sizes

    @property
    def code(self) -> int | None:
        """The rule for compiled hooks; None where `choose` is to be asked."""
        if self.layout is None or not self.is_own:
            return None
        return (1 if self.layout.kind == "channels" else 2) + 4 * self.layout.dims

    def choose(self, tensor: Tensor) -> int | None:
        """The dimension of the units, or None where there are none or fewer than two samples."""
        dims = tensor.dim()
        if dims == 2 and self.is_plain:
            return 1 if tensor.shape[0] > 1 else None
        if dims < 2:
            return None
        if self.is_own and self.layout is not None:
            return _require_samples(tensor, self.layout.find_dim(dims))
        try:
            traced = trace_units(tensor)
        except Exception as error:  # noqa: BLE001 - a graph that nobody foresaw; there is another way
            _log.debug("The graph of a %s was not followed: %s", type(tensor).__name__, error)
            traced = None
        if traced is not None and traced != LOST:
            return _require_samples(tensor, traced)
        found = self._choose_by_model(tensor, dims)
        if found is None and traced is None:
            found = 1 if dims > 3 else dims - 1
        return None if found is None or found == LOST else _require_samples(tensor, found)

    def choose_static(self, tensor: Tensor) -> int | None:
        """As `choose`, in code that is being compiled, where there is no graph.

        A size is looked at only where a layer of the model makes it a constant,
        since the compiler would make code for each size that is compared.
        """
        dims = tensor.dim()
        if dims < 2:
            return None
        if self.layout is not None:
            return _require_samples(tensor, self.layout.find_dim(dims))
        if dims == 2:
            return _require_samples(tensor, 1)
        if dims > 3:
            is_last = bool(self._sizes.features) and not self._sizes.has_channels(
                dims, tensor.shape[1]
            )
        else:
            is_last = not self._sizes.channels or tensor.shape[-1] in self._sizes.features
        return _require_samples(tensor, dims - 1 if is_last else 1)

    def _choose_by_model(self, tensor: Tensor, dims: int) -> int | None:
        """As the model's layers say; `LOST` where they disagree, None where they do not say."""
        if self.layout is not None:
            found = self.layout.find_dim(dims)
            return LOST if found is None else found
        fits_channels = self._sizes.has_channels(dims, tensor.shape[1])
        fits_features = tensor.shape[-1] in self._sizes.features
        if fits_channels and fits_features:
            return LOST
        if fits_channels:
            return 1
        return dims - 1 if fits_features else None


def find_layout(module: nn.Module) -> Layout | None:
    """Where a module's output has its units, or None where its class does not say."""
    if isinstance(module, _TRAITS_CHANNELS):
        return Layout("channels", _find_dims(module))
    if isinstance(module, _TRAITS_FEATURES) or type(module).__name__ == "RMSNorm":
        return Layout("features")
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return Layout("features")
    return None


def find_unit_rules(model: nn.Module) -> dict[int, UnitRule]:
    """Module, by its `id` -> where its output has its units."""
    sizes = _Sizes()
    modules = [place.module for place in name_modules(model)]
    for module in modules:
        _note_sizes(module, sizes)
    before: dict[int, Layout | None] = {}
    for module in modules:
        if isinstance(module, nn.Sequential):
            _follow(module, None, before)
    rules = {}
    for module in modules:
        own = find_layout(module)
        layout = before.get(id(module)) if own is None else own
        is_plain = own is None and not sizes.has_sequences
        rules[id(module)] = UnitRule(layout, own is not None, is_plain, sizes)
    return rules


def find_saturation(module: nn.Module, kind: str, threshold: float) -> tuple[float, float]:
    """At or below which value, and at or above which, an output of a module is saturated."""
    low, high = _RANGES.get(kind, (-1.0, 1.0))
    if isinstance(module, nn.Hardtanh):
        low, high = float(module.min_val), float(module.max_val)
    if low < 0.0 < high:
        return low * threshold, high * threshold
    upper = low + (high - low) * threshold
    if low == 0.0 and kind in _INACTIVE_AT_ZERO:
        return float("-inf"), upper
    return low + (high - low) * (1.0 - threshold), upper


def _require_samples(tensor: Tensor, dim: int | None) -> int | None:
    """The dimension, unless the tensor has fewer than two samples, or none but units."""
    if dim is None or dim == 0:
        return None
    if dim < tensor.dim() - 1 or tensor.dim() == 2:
        return dim if tensor.shape[0] > 1 else None
    size = tensor.shape[dim]
    return dim if size and tensor.numel() // size > 1 else None


def _follow(
    sequence: nn.Sequential, last: Layout | None, before: dict[int, Layout | None]
) -> Layout | None:
    """Note of the modules of a sequence which layout they are given; which one it gives."""
    for module in sequence:
        own = find_layout(module)
        if own is not None:
            last = own
        elif isinstance(module, nn.Sequential):
            last = _follow(module, last, before)
        elif not module._modules and _keeps_places(module):
            known = before.setdefault(id(module), last)
            # In several sequences, or twice in one, it is given several things.
            before[id(module)] = last if known == last else None
        else:
            last = None
    return last


def _keeps_places(module: nn.Module) -> bool:
    return isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd)) or (
        type(module).__module__ == "torch.nn.modules.activation"
    )


def _find_dims(module: nn.Module) -> int:
    """How many dimensions a module's batched output has; 0 where its class does not say."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return len(module.kernel_size) + 2
    if isinstance(module, nn.modules.batchnorm._NormBase):
        # That for sequences also takes plain features.
        return 0
    for kind in type(module).__mro__:
        found = _DIMENSIONS.fullmatch(kind.__name__)
        if found is not None:
            return int(found[1]) + 2
    return 0


def _note_sizes(module: nn.Module, sizes: _Sizes) -> None:
    """Note how many units a layer gives."""
    if isinstance(module, nn.modules.conv._ConvNd):
        sizes.channels.add((_find_dims(module), module.out_channels))
    elif isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm)):
        given = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
        sizes.channels.add((0, int(given)))
    elif isinstance(module, (nn.Linear, nn.Bilinear)):
        sizes.features.add(module.out_features)
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        sizes.features.add(module.embedding_dim)
    elif isinstance(module, nn.MultiheadAttention):
        sizes.features.add(module.embed_dim)
    elif isinstance(module, nn.RNNBase):
        sizes.features.add(module.hidden_size * (2 if module.bidirectional else 1))
    elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        sizes.features.add(module.normalized_shape[0])


class Site:
    """One instrumented module.

    Attributes:
        name, kind, aliases: Its name, class and other names.
        module: The module, weakly.
        units: Where its output has its units.
        near_zero: Epsilon of its activations.
        saturation: Its bounds, or None.
        calls: Counts its calls in the step.
        was_called: Whether it ever was.
        failed: Whether its hooks failed, and so do nothing any more.
        key: That of its forward hook in the module, once it had one.
        find_units, limits: `units` (a code, or a function to ask), near_zero and saturation for
            compiled hooks.
    """

    __slots__ = (
        "aliases",
        "calls",
        "failed",
        "find_units",
        "key",
        "kind",
        "limits",
        "module",
        "name",
        "near_zero",
        "saturation",
        "units",
        "was_called",
    )

    def __init__(
        self,
        selected: SelectedModule,
        units: UnitRule,
        near_zero: float,
        saturation: tuple[float, float] | None,
    ) -> None:
        self.name = selected.name
        self.kind = describe_type(selected.module)
        self.aliases = selected.aliases
        self.module = weakref.ref(selected.module)
        self.units = units
        self.near_zero = near_zero
        self.saturation = saturation
        self.calls = count()
        self.was_called = False
        self.failed = False
        self.key: int | None = None
        code = units.code
        self.find_units: int | Callable[[Tensor], int | None] = (
            units.choose if code is None else code
        )
        self.limits = pack_limits(Wanted(near_zero, saturation))

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """Name, class and other names."""
        return self.name, self.kind, self.aliases

    def register(self, module: nn.Module, hook: Any) -> RemovableHandle:
        """Register the module's forward hook, and note its key for the next time."""
        handle: RemovableHandle = module.register_forward_hook(hook)
        if type(module).register_forward_hook is nn.Module.register_forward_hook:
            self.key = handle.id
        return handle

    @property
    def is_missing(self) -> bool:
        """Whether it was never called, though it could have been, unlike a list of modules."""
        if self.was_called or self.failed:
            return False
        # A scripted module's class has no forward to be asked for, and a foreign one may have any.
        methods = [vars(kind).get("forward") for kind in type(self.module()).__mro__]
        forward = next((method for method in methods if method is not None), None)
        return forward is not vars(nn.Module)["forward"]
