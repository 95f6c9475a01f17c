"""Where Hydra's settings have their values from: the files that it chose, then the overrides.

Hydra is asked itself: its list of defaults says which files were merged in which order, and under
which key each lies. It must have been imported by whoever runs under it; nothing is imported here
that is not there already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark.configuration.layering.assignments import COMMAND_LINE, Assignment, name_place
from quark.configuration.layering.file_layers import read_config_file
from quark_core.errors import SchemaValidationError

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
        for key, value in _flatten(values):
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
        given = dict(_flatten({key: value})) if isinstance(value, Mapping) else {key: value}
        for path, item in given.items():
            chains.setdefault(path, []).append(Assignment(COMMAND_LINE, None, item))


def _flatten(values: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value
