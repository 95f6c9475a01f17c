"""Which instrumented modules the optimizers leave out."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from quark_core.errors import SchemaValidationError
from quark_torch.hook_site import Site
from quark_torch.parameter_list import list_optimizers

__all__ = ["OptimizerMembership"]


class OptimizerMembership:
    """Tells modules whose own trainable parameters are in no optimizer.

    The answer is worked out again when an optimizer has got another group of parameters.

    Args:
        model: The model.
        optimizer: Its optimizer, or several, or None.

    Raises:
        SchemaValidationError: An optimizer has no parameter of the model.
    """

    def __init__(self, model: nn.Module, optimizer: object) -> None:
        optimizers = list_optimizers(optimizer)
        own = {id(parameter) for parameter in model.parameters()}
        for one in optimizers:
            if not any(id(each) in own for group in one.param_groups for each in group["params"]):
                raise SchemaValidationError(
                    f"optimizer is another model's: none of the parameters of this "
                    f"{type(one).__name__} is one of this {type(model).__name__}"
                )
        self._optimizers = [weakref.ref(one) for one in optimizers]
        self._counted = -1
        self._outside: frozenset[str] = frozenset()

    def find_outside(self, sites: Sequence[Site]) -> frozenset[str]:
        """Names of the modules that are left out; none where no optimizer was given."""
        if not self._optimizers:
            return self._outside
        known = [one for reference in self._optimizers if (one := reference()) is not None]
        groups = 0
        for one in known:
            groups += len(one.param_groups)
        if groups != self._counted:
            self._counted = groups
            self._outside = _list_outside(known, sites)
        return self._outside


def _list_outside(
    optimizers: Sequence[torch.optim.Optimizer], sites: Sequence[Site]
) -> frozenset[str]:
    inside = {
        id(each) for one in optimizers for group in one.param_groups for each in group["params"]
    }
    if not inside:
        return frozenset()
    out = set()
    for site in sites:
        module = site.module()
        if module is None:
            continue
        trained = [each for each in module.parameters(recurse=False) if each.requires_grad]
        if trained and not any(id(each) in inside for each in trained):
            out.add(site.name)
    return frozenset(out)
