"""Finds the parameters of a model, each once, and where its optimizers keep them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from quark_core.api import SchemaValidationError
from quark_torch.layer_filter import ROOT_NAME, describe_type, name_modules, strip_prefixes
from quark_torch.parameters.config import ParameterDiagnosticsConfig

_MAX_WRAPPERS = 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class ListedParameter:
    """One parameter of a model.

    Attributes:
        name: Its full name, without the prefixes of wrappers; the first one where it has several.
        aliases: Its other names.
        module_name, module_type: The module that holds it under that name.
        role: weight, bias or other.
        parameter: The parameter itself.
    """

    name: str
    aliases: tuple[str, ...]
    module_name: str
    module_type: str
    role: str
    parameter: torch.Tensor


@dataclass(slots=True)
class OptimizerPlace:
    """Where an optimizer keeps a parameter.

    Attributes:
        optimizer_index: Which of the optimizers.
        optimizer_name: Its class.
        group_index: Which of its groups.
        group: The group, as the optimizer has it.
    """

    optimizer_index: int
    optimizer_name: str
    group_index: int
    group: Mapping[str, Any]
    _numbers: dict[str, float | None] = field(default_factory=dict)

    def find_number(self, key: str) -> float | None:
        """A hyperparameter of the group as a number; a tensor of one element is one."""
        if key not in self._numbers:
            # Kept, because a GPU is waited for where it is a tensor there.
            self._numbers[key] = _to_number(self.group.get(key))
        return self._numbers[key]

    @property
    def group_name(self) -> str | None:
        """The group's name, where it has one."""
        name = self.group.get("name")
        return name if isinstance(name, str) else None


def find_role(name: str) -> str:
    """The role of a parameter, by its name.

    The last part of the name counts (of a parametrized parameter the name
    that it had before): `bias` in it makes a bias, such as `in_proj_bias`,
    `weight` or `kernel` a weight, such as `weight_ih_l0`; the rest is other.
    """
    parts = name.split(".")
    if "parametrizations" in parts[:-1]:
        last = parts[parts.index("parametrizations") + 1]
    else:
        last = parts[-1]
    last = last.lower()
    if "bias" in last:
        return "bias"
    return "weight" if "weight" in last or "kernel" in last else "other"


class ParameterList:
    """The parameters that a config chooses of a model, as the model is when it is asked.

    Looking whether the model has changed is cheap; only then the list is made anew.
    """

    def __init__(self, model: torch.nn.Module, config: ParameterDiagnosticsConfig) -> None:
        self._model = model
        self._config = config
        self._structure: object = None
        self._found: list[ListedParameter] = []
        self._identities: frozenset[int] = frozenset()

    @property
    def known(self) -> list[ListedParameter]:
        """Those that were there when it was looked last."""
        return self._found

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter was among them."""
        return id(parameter) in self._identities

    def find(self) -> list[ListedParameter]:
        """The parameters in the model's order, each once."""
        structure = [
            (path, type(module), key, id(parameter), type(parameter))
            for path, module in self._model.named_modules(remove_duplicate=False)
            for key, parameter in module._parameters.items()
        ]
        if structure != self._structure:
            self._found = list_parameters(self._model, self._config)
            self._identities = frozenset(id(listed.parameter) for listed in self._found)
            self._structure = structure
        return self._found

    def forget(self) -> None:
        """Let go of the parameters."""
        self._structure = None
        self._found = []
        self._identities = frozenset()


def list_parameters(
    model: torch.nn.Module, config: ParameterDiagnosticsConfig
) -> list[ListedParameter]:
    """The parameters that a config chooses, in the model's order, each once."""
    names: dict[int, list[tuple[str, str, str]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module_name, module in _name_holders(model):
        module_type = describe_type(module)
        for key, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter):
                continue
            name = f"{module_name}.{key}" if module_name else key
            tensors.setdefault(id(parameter), parameter)
            place = (name, module_name or ROOT_NAME, module_type)
            names.setdefault(id(parameter), []).append(place)
    include = [re.compile(pattern) for pattern in config.include_parameter_patterns]
    exclude = [re.compile(pattern) for pattern in config.exclude_parameter_patterns]
    found = []
    for identity, places in names.items():
        name, module_name, module_type = places[0]
        aliases = tuple(dict.fromkeys(place[0] for place in places[1:] if place[0] != name))
        role = find_role(name)
        if config.include_parameter_roles and role not in config.include_parameter_roles:
            continue
        if include and not _is_matched(include, (name, *aliases)):
            continue
        if exclude and _is_matched(exclude, (name, *aliases)):
            continue
        found.append(
            ListedParameter(name, aliases, module_name, module_type, role, tensors[identity])
        )
    return found


def list_optimizers(optimizer: object) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a caller gave: none, one, or several.

    Wrappers that are none themselves, and hold an optimizer in an attribute, are taken off.

    Raises:
        SchemaValidationError: Something else was given.
    """
    if optimizer is None:
        return ()
    given: Iterable[object] = (optimizer,)
    if isinstance(optimizer, Mapping):
        given = optimizer.values()
    elif isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups"):
        given = optimizer
    found: list[torch.optim.Optimizer] = []
    for candidate in given:
        found.extend(one for one in _take_off_wrappers(candidate) if one not in found)
    inner = [part for one in found for part in find_inner_optimizers(one)]
    return tuple(one for one in found if one not in inner)


def hold_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """The `id` of every parameter that an optimizer has."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}


def find_inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that an optimizer holds and that share parameters with it, as SAM's do."""
    found: list[torch.optim.Optimizer] = []
    waiting = [optimizer]
    while waiting and len(found) < _MAX_WRAPPERS:
        held = _list_held(waiting.pop())
        own = hold_parameters(optimizer) if held else set()
        new = [
            one
            for one in held
            if one is not optimizer and one not in found and hold_parameters(one) & own
        ]
        found += new
        waiting += new
    return found


def locate_parameters(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, OptimizerPlace]:
    """Where each parameter is kept, by the `id` of the parameter; the first place wins."""
    places: dict[int, OptimizerPlace] = {}
    for optimizer_index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        for group_index, group in enumerate(optimizer.param_groups):
            place = OptimizerPlace(optimizer_index, name, group_index, group)
            for parameter in group["params"]:
                places.setdefault(id(parameter), place)
    return places


def may_change(parameter: torch.Tensor) -> bool:
    """Whether an optimizer that has a parameter may change it.

    A frozen one is left alone only once it has no gradient: with one that is
    left over from before, or zeros, weight decay and momentum move it still.
    """
    return parameter.requires_grad or parameter.grad is not None


def take_local(tensor: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """What this process holds of a tensor, and what that is, where it is not all of it.

    Nothing is ever gathered: of a DTensor it is the `local_shard`, or the
    `local_partial` where it is still to be reduced. Called without gradients.
    """
    if type(tensor) in _PLAIN:
        return tensor, None
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "to_local"):
        return tensor, None
    local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        return local, "local_partial"
    if all(placement.is_replicate() for placement in placements):
        return local, None
    return local, "local_shard"


def _name_holders(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module with parameters of its own, in every place that it has."""
    stable = {place.path: place.name for place in name_modules(model)}
    for path, module in model.named_modules(remove_duplicate=False):
        if not module._parameters:
            continue
        name = stable.get(path)
        if name is None:
            # Wrappers and parametrizations, which are no layers, hold parameters all the same.
            above, rest = path, ""
            while above and above not in stable:
                above, _, last = above.rpartition(".")
                rest = f"{last}.{rest}" if rest else last
            parts = (stable.get(above, ""), strip_prefixes(rest))
            name = ".".join(part for part in parts if part)
        yield name, module


def _to_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_matched(patterns: Sequence[re.Pattern[str]], names: Sequence[str]) -> bool:
    return any(pattern.search(name) for pattern in patterns for name in names)


def _take_off_wrappers(candidate: object) -> list[torch.optim.Optimizer]:
    inner: Any = candidate
    for _ in range(_MAX_WRAPPERS):
        if _is_made(inner):
            return [inner]
        if not hasattr(inner, "optimizer"):
            break
        inner = inner.optimizer
    held = [one for one in _list_held(candidate) if _is_made(one)]
    if held:
        return held
    if isinstance(candidate, torch.optim.Optimizer) and hasattr(candidate, "param_groups"):
        return [candidate]
    raise SchemaValidationError(
        "optimizer must be a torch.optim.Optimizer, a sequence of them, or None, not "
        f"{type(candidate).__name__}"
    )


def _is_made(candidate: object) -> bool:
    """Whether it is an optimizer that PyTorch's own constructor has made, so that it has hooks."""
    return isinstance(candidate, torch.optim.Optimizer) and (
        "_optimizer_step_pre_hooks" in vars(candidate)
    )


def _list_held(holder: object) -> list[torch.optim.Optimizer]:
    """The optimizers in an object's attributes, or in a list or a dict there."""
    values: list[Any] = []
    for value in getattr(holder, "__dict__", {}).values():
        if type(value) in (list, tuple):
            values.extend(value)
        elif type(value) is dict:
            values.extend(value.values())
        else:
            values.append(value)
    return [value for value in values if isinstance(value, torch.optim.Optimizer)]
