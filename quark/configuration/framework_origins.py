"""Origins of the settings in configurations of Hydra and OpenMMLab."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quark.configuration.layering.config_files import FILE_ENDINGS, read_config_file
from quark.configuration.layering.layered_config import COMMAND_LINE, Assignment, name_place
from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import flatten_json

# Where Hydra's settings have their values from: the files that it chose, then the overrides.
#
# Hydra is asked itself: its list of defaults says which files were merged in which order, and under
# which key each lies. It must have been imported by whoever runs under it; nothing is imported here
# that is not there already.

_OWN = "hydra"


def find_hydra_chains() -> dict[str, list[Assignment]]:
    """Setting -> the values that it was given, the oldest first; nothing where Hydra does not run.

    Raises:
        Exception: This Hydra keeps what is asked for elsewhere.
    """
    config = sys.modules["hydra.core.hydra_config"].HydraConfig
    if not config.initialized():
        return {}
    known = config.get()
    overrides = [str(each) for each in known.overrides.task]
    chains: dict[str, list[Assignment]] = {}
    for name, package, place, values in _list_files(str(known.job.config_name), overrides):
        lines = _read_lines(place)
        shown = None if place is None else name_place(str(place))
        for key, value in flatten_json(values):
            line = lines.get(key)
            where = shown if shown is None or line is None else f"{shown}:{line}"
            path = f"{package}.{key}" if package else key
            chains.setdefault(path, []).append(Assignment(name, where, value))
    _apply_overrides(chains, overrides, set(known.runtime.choices))
    return chains


def _list_files(
    config_name: str, overrides: list[str]
) -> Iterator[tuple[str, str, Path | None, Mapping[str, Any]]]:
    """Name, key that it lies under, path and values of each file, in the order of merging."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    to_container: Any = OmegaConf.to_container
    loader: Any = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list(
        config_name=config_name, overrides=overrides, run_mode=RunMode.RUN
    )
    for each in listed.defaults:
        name = each.config_path
        if name is None or name.partition("/")[0] == _OWN:
            continue
        found = loader.repository.load_config(name)
        if found is None or not OmegaConf.is_dict(found.config):
            continue
        values = to_container(found.config, resolve=False)
        yield name, each.package or "", _find_file(str(found.path), name), values


def _find_file(folder: str, name: str) -> Path | None:
    if not folder.startswith("file://"):
        return None
    path = Path(folder.removeprefix("file://")) / name
    for candidate in (
        path,
        path.with_name(f"{path.name}.yaml"),
        path.with_name(f"{path.name}.yml"),
    ):
        if candidate.is_file():
            return candidate
    return None


def _read_lines(path: Path | None) -> Mapping[str, int]:
    try:
        return {} if path is None else read_config_file(path).lines
    except SchemaValidationError:
        return {}


def _apply_overrides(
    chains: dict[str, list[Assignment]], overrides: list[str], groups: set[str]
) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if override.package is not None or key in groups:
            continue
        if override.is_delete():
            for path in [each for each in chains if each == key or each.startswith(f"{key}.")]:
                del chains[path]
            continue
        value = override.value()
        given = dict(flatten_json({key: value})) if isinstance(value, Mapping) else {key: value}
        for path, item in given.items():
            chains.setdefault(path, []).append(Assignment(COMMAND_LINE, None, item))


# Where settings of an OpenMMLab configuration have their values from: the chain of `_base_`.
#
# The files are read once more, and none is run: Python by its syntax, as far as assignments of
# literals and of `dict(...)` go, JSON, YAML and TOML as everywhere. What they say otherwise than
# the configuration does was changed since, which `keeping` tells.

_MOST_FILES = 200
_MAX_DEPTH = 20
_MOST_BYTES = 2_000_000
_BASE, _DELETE = "_base_", "_delete_"
_SHOWN_SOURCE = 200


@dataclass(slots=True)
class _Chain:
    """What the files of one configuration say.

    Attributes:
        found: Setting -> its values, the oldest first.
        count: How many files were read.
    """

    found: dict[str, list[Assignment]] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Setting:
    key: str
    line: int | None
    value: Any


def find_openmmlab_chains(config: object) -> dict[str, list[Assignment]]:
    """Setting -> the values that it was given by the files, the oldest first.

    Args:
        config: An `mmengine.Config` or `mmcv.Config`; one that is of no file is of nothing.
    """
    name = getattr(config, "filename", None)
    if not isinstance(name, (str, Path)) or not Path(name).is_file():
        return {}
    chain = _Chain()
    _read(Path(name), chain, ())
    return chain.found


def _read(path: Path, chain: _Chain, above: tuple[Path, ...]) -> None:
    """Take over what a file says, its bases first."""
    path = path.resolve()
    if path in above or len(above) >= _MAX_DEPTH or chain.count >= _MOST_FILES:
        return
    chain.count += 1
    try:
        bases, settings, deletes = _read_file(path)
    except (SchemaValidationError, SyntaxError, ValueError, OSError, RecursionError):
        return
    for base in bases:
        _read(path.parent / base, chain, (*above, path))
    for key in deletes:
        for known in [each for each in chain.found if each.startswith(f"{key}.")]:
            del chain.found[known]
    shown = name_place(str(path))
    for each in settings:
        place = shown if each.line is None else f"{shown}:{each.line}"
        chain.found.setdefault(each.key, []).append(Assignment(path.stem, place, each.value))


def _read_file(path: Path) -> tuple[list[str], list[_Setting], list[str]]:
    """The bases of a file, its settings, and the keys of which it takes nothing over."""
    if path.suffix.lower() in FILE_ENDINGS:
        return _read_plain(path)
    if path.suffix.lower() != ".py" or path.stat().st_size > _MOST_BYTES:
        return [], [], []
    bases: list[str] = []
    settings: list[_Setting] = []
    deletes: list[str] = []
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.With):
            bases += _list_imported(statement)
        elif isinstance(statement, ast.Expr):
            _read_update(statement.value, settings, deletes)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                key = _name_target(target)
                if key == _BASE:
                    bases += _read_bases(statement.value)
                elif key is not None:
                    _collect(key, statement.value, settings, deletes, 0)
    return bases, settings, deletes


def _read_plain(path: Path) -> tuple[list[str], list[_Setting], list[str]]:
    found = read_config_file(path)
    values = dict(found.values)
    given = values.pop(_BASE, [])
    listed = given if isinstance(given, list) else [given]
    settings: list[_Setting] = []
    deletes: list[str] = []
    for key, value in flatten_json(values):
        if key.rpartition(".")[2] == _DELETE:
            deletes.append(key.rpartition(".")[0])
        else:
            settings.append(_Setting(key, found.lines.get(key), value))
    return [each for each in listed if isinstance(each, str)], settings, deletes


def _list_imported(statement: ast.With) -> list[str]:
    """Files that `with read_base(): from .schedules.long import *` names."""
    called = [item.context_expr for item in statement.items]
    if not any(isinstance(each, ast.Call) and _name(each.func) == "read_base" for each in called):
        return []
    found: list[str] = []
    for each in statement.body:
        if isinstance(each, ast.ImportFrom) and each.level and each.module:
            ups = [".."] * (each.level - 1)
            found.append("/".join([*ups, *each.module.split(".")]) + ".py")
    return found


def _read_bases(value: ast.expr) -> list[str]:
    listed = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    return [
        each.value
        for each in listed
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _name_target(node: ast.expr) -> str | None:
    """`model`, `model.backbone` and `model["backbone"]` as a key; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above, name = _name_target(node.value), node.attr
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        above, name = _name_target(node.value), str(node.slice.value)
    else:
        return None
    return None if above is None else f"{above}.{name}"


def _read_update(node: ast.expr, settings: list[_Setting], deletes: list[str]) -> None:
    """`optimizer.update(lr=0.1)`, as configurations of the newer style have it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    key = _name_target(node.func.value)
    if node.func.attr != "update" or key is None:
        return
    for keyword in node.keywords:
        if keyword.arg is not None:
            _collect(f"{key}.{keyword.arg}", keyword.value, settings, deletes, 0)
    for each in node.args:
        _collect(key, each, settings, deletes, 0)


def _collect(
    key: str, node: ast.expr, settings: list[_Setting], deletes: list[str], depth: int
) -> None:
    """Settings of an expression: those of `dict(...)` and of `{...}` one by one."""
    items: list[tuple[str, ast.expr]] | None = None
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        items = [(each.arg, each.value) for each in node.keywords if each.arg is not None]
    elif isinstance(node, ast.Dict):
        items = [
            (str(name.value), value)
            for name, value in zip(node.keys, node.values, strict=True)
            if isinstance(name, ast.Constant)
        ]
    if not items or depth >= _MAX_DEPTH:
        settings.append(_Setting(key, node.lineno, _evaluate(node)))
        return
    for name, value in items:
        if name == _DELETE:
            deletes.append(key)
        else:
            _collect(f"{key}.{name}", value, settings, deletes, depth + 1)


def _evaluate(node: ast.expr) -> Any:
    """A literal's value; of anything else how it is written."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ast.unparse(node)[:_SHOWN_SOURCE]
