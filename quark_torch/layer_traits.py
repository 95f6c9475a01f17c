"""What is to be known of a module to read its output: its range and where its units are.

Units are channels or features. Convolutions and what belongs to them have them
in dimension 1; linear layers, embeddings, layer norms, attention and recurrent
layers in the last one. An activation function has none of its own: it
follows the module defined before it in its model, and without one it has them
in dimension 1 of a tensor of four dimensions or more, else in the last.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from quark_torch.layer_filter import name_modules

__all__ = ["Layout", "choose_unit_dim", "find_layout", "find_layouts", "find_saturation"]

Layout = Literal["channels", "features"]

_CHANNELS = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_FEATURES = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Flatten,
)
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


def find_layout(module: nn.Module) -> Layout | None:
    """Where a module's output has its units, or None where its class does not say."""
    if isinstance(module, _CHANNELS):
        return "channels"
    if isinstance(module, _FEATURES) or type(module).__name__ == "RMSNorm":
        return "features"
    return None


def find_layouts(model: nn.Module) -> dict[int, Layout]:
    """Module, by its `id` -> its layout, or that of the module defined before it."""
    found: dict[int, Layout] = {}
    last: Layout | None = None
    for place in name_modules(model):
        own = find_layout(place.module)
        last = own or last
        if last is not None and (own is not None or not place.module._modules):
            found.setdefault(id(place.module), last)
    return found


def choose_unit_dim(tensor: Tensor, layout: Layout | None) -> int | None:
    """The dimension of the units, or None where there are none or fewer than two samples."""
    dims = tensor.dim()
    if dims < 2:
        return None
    if layout == "channels" or (layout is None and dims > 3):
        return 1 if tensor.shape[0] > 1 else None
    last = tensor.shape[-1]
    return dims - 1 if last and tensor.numel() // last > 1 else None


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
