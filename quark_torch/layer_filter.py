"""Filters of the layers that are observed, and the mode of each layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from quark_torch.checks import check_flags, take_patterns, take_texts


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


ROOT_NAME = "(model)"
"""Name of the model itself, which has none; a record's name must not be empty."""

# Class of a wrapper -> the child that is the model itself.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
}
_MARKED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class LayerFilterConfig:
    """Selection of the modules to record.

    A module is selected if it matches one of the names or patterns (if there are any) and one of
    the types (if there are any), and is not excluded.

    Attributes:
        include_names, exclude_names: Names as in `model.named_modules()`, with or without prefixes
            of wrappers such as DDP.
        include_types, exclude_types: Class names such as `Linear`, or qualified ones such as
            `torch.nn.Linear`.
        include_name_patterns, exclude_name_patterns: Regular expressions to search for in the name,
            without prefixes of wrappers.
        leaf_modules_only: Whether to omit modules that contain modules. A `MultiheadAttention`
            counts as a leaf, because it does not call its `out_proj`.

    Raises:
        SchemaValidationError: A value is invalid, such as a malformed regular expression. The
            message names the field.
    """

    include_names: tuple[str, ...] = ()
    exclude_names: tuple[str, ...] = ()
    include_types: tuple[str, ...] = ()
    exclude_types: tuple[str, ...] = ()
    include_name_patterns: tuple[str, ...] = ()
    exclude_name_patterns: tuple[str, ...] = ()
    leaf_modules_only: bool = True

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            if item.name == "leaf_modules_only":
                check_flags(leaf_modules_only=value)
                continue
            take = take_patterns if item.name.endswith("patterns") else take_texts
            object.__setattr__(self, item.name, take(value, item.name))

    def describe(self) -> str:
        """Return the filters that are set, as the call that creates them."""
        given = (
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if getattr(self, item.name) != item.default
        )
        return f"LayerFilterConfig({', '.join(given)})"


class NamedModule(NamedTuple):
    """A module in its place.

    Attributes:
        name: Its name without the prefixes of wrappers; empty for the model itself.
        path: Its name as `named_modules()` has it.
        module: The module.
        is_compiled: Whether `torch.compile` has been applied to it, or to one that holds it.
    """

    name: str
    path: str
    module: nn.Module
    is_compiled: bool


class SelectedModule(NamedTuple):
    """A module that is instrumented.

    Attributes:
        name: Its first name, `(model)` for the model itself.
        aliases: The other names under which the model holds it.
        module: The module.
        is_compiled: As in `NamedModule`.
    """

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    is_compiled: bool


def strip_prefixes(name: str) -> str:
    """The name that a module or parameter has in the model that was wrapped.

    Takes off what DDP, `torch.compile`, FSDP and the checkpoint wrapper add.
    By the name alone, `module` is taken to be a wrapper where it comes first;
    `name_modules` knows better.
    """
    parts = [part for part in name.split(".") if part not in _MARKED]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def name_modules(model: nn.Module) -> Iterator[NamedModule]:
    """Every module in every place that it has, outer ones first, wrappers left out."""
    yield from _walk(model, "", "", False, frozenset())


def select_modules(model: nn.Module, filters: LayerFilterConfig) -> list[SelectedModule]:
    """The modules that the filters choose, each once, in the model's order."""
    names = frozenset(filters.include_names)
    patterns = [re.compile(text) for text in filters.include_name_patterns]
    types = frozenset(filters.include_types)
    not_names = frozenset(filters.exclude_names)
    not_patterns = [re.compile(text) for text in filters.exclude_name_patterns]
    not_types = frozenset(filters.exclude_types)
    places: dict[int, list[NamedModule]] = {}
    for place in name_modules(model):
        places.setdefault(id(place.module), []).append(place)
    chosen: list[SelectedModule] = []
    uncalled = {
        id(child)
        for found in places.values()
        if _calls_no_child(found[0].module)
        for child in found[0].module.children()
    }
    for found in places.values():
        module = found[0].module
        if filters.leaf_modules_only and (id(module) in uncalled or not _is_leaf(module)):
            continue
        kinds = list_types(module)
        texts = {text for place in found for text in (place.name, place.path)}
        searched = [place.name for place in found]
        if (names or patterns) and not (names & texts or _is_found(patterns, searched)):
            continue
        if types and not types & kinds:
            continue
        if not_names & texts or not_types & kinds or _is_found(not_patterns, searched):
            continue
        stable = list(dict.fromkeys(place.name or ROOT_NAME for place in found))
        is_compiled = any(place.is_compiled for place in found)
        chosen.append(SelectedModule(stable[0], tuple(stable[1:]), module, is_compiled))
    return chosen


def _is_leaf(module: nn.Module) -> bool:
    if _calls_no_child(module):
        return True
    return all(name == "parametrizations" for name, _ in module.named_children())


def _calls_no_child(module: nn.Module) -> bool:
    # In this order, since classes of scripted modules cannot be asked for their forward.
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    )


def describe_type(module: nn.Module) -> str:
    """Class name of a module, as it was before FSDP2 or a parametrization replaced its class."""
    return _find_class(module).__name__


def _walk(
    module: nn.Module, name: str, path: str, is_compiled: bool, above: frozenset[int]
) -> Iterator[NamedModule]:
    if id(module) in above:
        return
    above = above | {id(module)}
    is_compiled = (
        is_compiled
        or type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )
    inner = _find_inner(module)
    if inner is None:
        yield NamedModule(name, path, module, is_compiled)
    for key, child in module._modules.items():
        if child is None or key == "parametrizations":
            continue
        below = name if key == inner else f"{name}.{key}" if name else key
        yield from _walk(child, below, f"{path}.{key}" if path else key, is_compiled, above)


def _find_inner(module: nn.Module) -> str | None:
    """The child that a wrapper wraps, or None where the module is no wrapper."""
    for base in type(module).__mro__:
        inner = _WRAPPERS.get(base.__name__)
        if inner in module._modules:
            return inner
    return None


def _find_class(module: nn.Module) -> type:
    kind = type(module)
    for base in kind.__mro__[1:]:
        if kind.__name__ not in (f"FSDP{base.__name__}", f"Parametrized{base.__name__}"):
            continue
        return base
    return kind


def list_types(module: nn.Module) -> set[str]:
    """The names by which filters know a module's class."""
    found: set[str] = set()
    for kind in {type(module), _find_class(module)}:
        found |= {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        if kind.__module__.startswith("torch.nn.modules."):
            found.add(f"torch.nn.{kind.__qualname__}")
    return found


def _is_found(patterns: list[re.Pattern[str]], names: list[str]) -> bool:
    return any(pattern.search(name) for pattern in patterns for name in names)
