"""Reads what the user chose: `wandb`, `wandb:PROJECT`, `wandb:ENTITY/PROJECT?option=value`.

Options:

    mode       online, offline or disabled; else WANDB_MODE, else online
    entity     W&B's user or team
    project    W&B's project; else WANDB_PROJECT, else the run's project
    group      group of the W&B run; else that of the run's tag `group:NAME`, else its
               lineage, if it has a parent
    job_type   its job type; else that of the tag `job_type:NAME`
    tags       more tags, separated by commas or semicolons
    names      `kept` (default) or `strict`: letters, digits and `_` only, by
               which alone W&B's run table sorts and filters
    layers     how many layers, and how many parameters, have curves in W&B;
               50 by default, or `all`
    sources    `1`: the code that the run is made of goes to W&B too, as an artifact
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from quark_backends.mirroring.saved_state import make_file_name
from quark_core.api import SOURCES_OPTION, BackendConfig, BackendUnusable

_MODES = ("online", "offline", "disabled")
_NAMES = (
    "mode",
    "entity",
    "project",
    "group",
    "job_type",
    "tags",
    "names",
    "layers",
    SOURCES_OPTION,
)
_DEFAULT_LAYERS = 50
_MAX_TAG_LENGTH = 64


class WandbOptions(msgspec.Struct, frozen=True):
    """What the user chose for the mirror.

    Attributes:
        mode: online, offline or disabled; None is WANDB_MODE, else online.
        entity: W&B's user or team; None is WANDB_ENTITY, else the account's own.
        project: W&B's project; None is WANDB_PROJECT, else the run's project.
        group: Group of the W&B run; None is the run's lineage, if it has a parent.
        job_type: Its job type.
        tags: Tags besides those of the run.
        strict_names: Whether names of metrics are changed so that W&B's table sorts by them.
        layers: How many layers, and how many parameters, have curves; None is all.
        keeps_sources: Whether W&B gets the code that the run is made of.
    """

    mode: str | None = None
    entity: str | None = None
    project: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    strict_names: bool = False
    layers: int | None = 50
    keeps_sources: bool = False


def read_options(config: BackendConfig) -> WandbOptions:
    """What the user chose.

    Raises:
        BackendUnusable: An option that there is not, or a value that it does not take.
    """
    given = dict(config.options)
    unknown = sorted(set(given) - set(_NAMES))
    if unknown:
        raise _unusable(f"the W&B mirror has no option {unknown[0]!r}; it has {', '.join(_NAMES)}")
    entity, _, project = config.location.strip("/").rpartition("/")
    if "/" in entity:
        raise _unusable(f"wandb:{config.location} must be wandb:ENTITY/PROJECT")
    mode = given.get("mode")
    if mode is not None and mode not in _MODES:
        raise _unusable(f"mode must be {', '.join(_MODES)}, got {mode!r}")
    names = given.get("names", "kept")
    if names not in ("kept", "strict"):
        raise _unusable(f"names must be kept or strict, got {names!r}")
    layers = given.get("layers", str(_DEFAULT_LAYERS))
    if layers != "all" and not layers.isdecimal():
        raise _unusable(f"layers must be a number or all, got {layers!r}")
    sources = given.get(SOURCES_OPTION, "0")
    if sources not in ("0", "1"):
        raise _unusable(f"sources must be 0 or 1, got {sources!r}")
    tags = (tag.strip()[:_MAX_TAG_LENGTH] for tag in re.split("[,;]", given.get("tags", "")))
    return WandbOptions(
        mode=mode,
        entity=given.get("entity") or entity or None,
        project=given.get("project") or project or None,
        group=given.get("group") or None,
        job_type=given.get("job_type") or None,
        tags=tuple(tag for tag in tags if tag),
        strict_names=names == "strict",
        layers=None if layers == "all" else int(layers),
        keeps_sources=sources == "1",
    )


def choose_folder(run_path: Path, options: WandbOptions) -> Path:
    """Where the mirror keeps its files: a run may be mirrored to several W&B projects."""
    wanted = "/".join(part for part in (options.entity, options.project) if part)
    if not wanted:
        return run_path / "mirrors" / "wandb" / "default"
    kept = make_file_name(wanted)[:60]
    digest = hashlib.sha256(wanted.encode("utf-8", "replace")).hexdigest()[:8]
    return run_path / "mirrors" / "wandb" / f"{kept}-{digest}"


def _unusable(message: str) -> BackendUnusable:
    return BackendUnusable(message, backend="wandb")
