"""The MLflow mirror, as a tracker asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from quark_backends.mirror_state import load_newest_note
from quark_core.api import BackendConfig, MirrorRun, ProjectMirror, RunRecord, redact_text


class MLflowBackend(ProjectMirror):
    """MLflow mirror as a tracker backend; writes to MLFLOW_TRACKING_URI.

    Has the logging methods of `Tracker`.

    Args:
        project_name: Name of the project and of the MLflow experiment. MLFLOW_EXPERIMENT_NAME
            overrides the experiment.
        config: Config of the run.
        outdir: Folder of Quark's own store.
        rank: Rank of this process. Inactive if it is not 0. Defaults to the detected rank.
        **kwargs: Arguments of `mlflow.start_run`. `setup_tracker` uses `run_name`, `tags` and
            `description` for the run. The others have no effect.
    """

    def __init__(
        self,
        project_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        outdir: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        **kwargs: Any,  # noqa: ARG002 - so that a call written for ezpz goes through
    ) -> None:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "").strip()
        options = {"experiment": experiment} if experiment else {}
        super().__init__("mlflow", options, project_name, config, outdir, rank)


def describe_run(config: BackendConfig, run: RunRecord) -> MirrorRun:
    """See `BackendDefinition.describe_run`."""
    uri = config.location or os.environ.get("MLFLOW_TRACKING_URI") or None
    assert config.run_path is not None
    place = config.run_path / "mirrors" / "mlflow"
    folder, state = load_newest_note(place, "run.json", "mlflow_run_id")
    mlflow_id = state.get("mlflow_run_id")
    return MirrorRun(
        "mlflow",
        mlflow_id,
        run.name or mlflow_id,
        config.project,
        tracking_uri=None if uri is None else redact_text(uri),
        url=state.get("url") or None,
        directory=folder,
    )
