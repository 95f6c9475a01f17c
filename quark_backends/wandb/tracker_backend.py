"""The W&B mirror, as a tracker asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from quark_backends.mirror_state import load_newest_note
from quark_backends.wandb.backend import read_options
from quark_core.api import BackendConfig, MirrorRun, ProjectMirror, RunRecord

_OPTIONS = ("mode", "entity", "group", "job_type")


class WandbBackend(ProjectMirror):
    """W&B mirror as a tracker backend.

    Has the logging methods of `Tracker`.

    Args:
        project_name: Name of the W&B project. Defaults to WANDB_PROJECT, then to the run's project.
        config: Config of the run.
        outdir: Folder of Quark's own store and of W&B's files.
        rank: Rank of this process. Inactive if it is not 0. Defaults to the detected rank.
        **kwargs: `mode`, `entity`, `group`, `job_type` and `tags` of `wandb.init`. The others have
            no effect.
    """

    def __init__(
        self,
        project_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        outdir: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        options = {"project": project_name} if project_name else {}
        for option in _OPTIONS:
            if kwargs.get(option) is not None:
                options[option] = str(kwargs[option])
        tags = kwargs.get("tags")
        if isinstance(tags, (list, tuple, set, frozenset)) and tags:
            options["tags"] = ";".join(sorted(map(str, tags)))
        super().__init__("wandb", options, project_name, config, outdir, rank)


def describe_run(config: BackendConfig, run: RunRecord) -> MirrorRun:
    """See `BackendDefinition.describe_run`."""
    options = read_options(config)
    assert config.run_path is not None
    folder, state = load_newest_note(
        config.run_path / "mirrors" / "wandb", "state.json", "wandb_id"
    )
    wandb_id = state.get("wandb_id") or None
    return MirrorRun(
        "wandb",
        wandb_id,
        run.name or wandb_id,
        options.project or os.environ.get("WANDB_PROJECT") or config.project,
        state.get("entity") or options.entity or os.environ.get("WANDB_ENTITY") or None,
        url=state.get("url") or None,
        directory=folder,
    )
