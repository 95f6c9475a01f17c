"""What is known here of a run in another tool, which a mirror feeds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from quark_core.backend_choice import choose_backend
from quark_core.redaction import redact_text
from quark_core.registry import default_registry

if TYPE_CHECKING:
    from quark_core.session import TrainingSession

__all__ = ["MirrorRun", "find_mirror_run"]


class MirrorRun(msgspec.Struct, frozen=True):
    """A run in another tool, read-only: the tool itself works elsewhere.

    The mirrors of W&B and MLflow live in helper processes, so that neither can
    touch training; there is no object of theirs to hand out here. To log, use
    the tracker.

    Attributes:
        backend: wandb, mlflow, csv or another mirror's name.
        id: Its id there; None until the mirror has begun it.
        name: Its name, or None.
        project: Project or experiment there.
        entity: W&B's user or team, where it is known.
        tracking_uri: MLflow's, where it was given.
        url: Its page, once the mirror has begun the run: None of a tracking store without
            a server, and of a W&B run that has only been offline.
        directory: Where the mirror keeps its files on this machine, or None.
    """

    backend: str
    id: str | None = None
    name: str | None = None
    project: str | None = None
    entity: str | None = None
    tracking_uri: str | None = None
    url: str | None = None
    directory: Path | None = None

    @property
    def experiment(self) -> str | None:
        """The project, as MLflow calls it."""
        return self.project


def find_mirror_run(session: TrainingSession, backend: str, specification: str) -> MirrorRun:
    """What is known of a session's run in a mirror, as of now.

    Args:
        session: The session.
        backend: Name of the mirror.
        specification: How it was asked for.
    """
    run = session.context.run
    run_path = session.run_path if isinstance(session.run_path, Path) else Path(run.run_path)
    name, project = run.name, session.project_name
    if backend == "wandb":
        rest = specification[len(backend) :]
        options = {key: values[-1] for key, values in parse_qs(rest.partition("?")[2]).items()}
        place = rest.partition("?")[0].strip(":/").rpartition("/")
        entity = options.get("entity") or place[0] or os.environ.get("WANDB_ENTITY") or None
        there = options.get("project") or place[2] or os.environ.get("WANDB_PROJECT") or project
        folder, state = _load(run_path / "mirrors" / "wandb", "state.json", "wandb_id")
        wandb_id = state.get("wandb_id") or None
        return MirrorRun(
            backend,
            wandb_id,
            name or wandb_id,
            there,
            state.get("entity") or entity,
            url=state.get("url") or None,
            directory=folder,
        )
    if backend == "mlflow":
        location = choose_backend(specification, default_registry()).location
        uri = location or os.environ.get("MLFLOW_TRACKING_URI") or None
        folder, state = _load(run_path / "mirrors" / "mlflow", "run.json", "mlflow_run_id")
        mlflow_id = state.get("mlflow_run_id")
        return MirrorRun(
            backend,
            mlflow_id,
            name or mlflow_id,
            project,
            tracking_uri=None if uri is None else redact_text(uri),
            url=state.get("url") or None,
            directory=folder,
        )
    folder = run_path / "csv" if specification.partition("?")[0] in ("csv", "csv:") else None
    return MirrorRun(backend, run.id, name, project, directory=folder)


def _load(folder: Path, file_name: str, key: str) -> tuple[Path | None, dict[str, Any]]:
    """What a mirror has noted of its run: the newest of the files, and its folder."""
    found: list[tuple[int, Path, dict[str, Any]]] = []
    try:
        for path in folder.glob(f"*/{file_name}"):
            state = json.loads(path.read_text("utf-8"))
            if isinstance(state, dict):
                found.append((path.stat().st_mtime_ns, path.parent, state))
    except (OSError, ValueError):
        # It is being replaced at this moment, or it was removed.
        return None, {}
    known = [item for item in found if item[2].get(key)] or found
    if not known:
        return None, {}
    _, place, state = max(known, key=lambda item: item[0])
    return place, state
