"""Modules that do one thing in training and another in evaluation, and the mode they are in."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd


def depends_on_mode(module: nn.Module) -> bool:
    """Whether a module of PyTorch's own gives something else in training than in evaluation."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return module.track_running_stats
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def is_left_in_evaluation(model: nn.Module) -> bool:
    """Whether a model is in evaluation mode as a whole, and what it trains would need the other.

    A frozen body in evaluation mode under a head that trains is not.
    """
    if model.training:
        return False
    found = False
    for holder in model.modules():
        own = [module for module in holder.children() if depends_on_mode(module)]
        if depends_on_mode(holder) and holder is model:
            own.append(holder)
        if any(module.training for module in own):
            return False
        found = found or (bool(own) and any(each.requires_grad for each in holder.parameters()))
    return found
