"""Where MLflow 2 finds the artifacts that a tracking server takes itself."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["route_artifacts"]

_PROXIED = "mlflow-artifacts:"


def route_artifacts(mlflow: ModuleType, client: Any, uri: str) -> None:
    """Make a client take its own tracking URI to a server's artifacts.

    MLflow 2 takes the one that is set for the whole process, which is the
    user's. MLflow 3 does right by itself and is left alone.

    Args:
        mlflow: The imported library.
        client: An `MlflowClient`.
        uri: Its tracking URI.
    """
    tracking: Any = getattr(client, "_tracking_client", None)
    find = getattr(tracking, "_get_artifact_repo", None)
    if not str(mlflow.__version__).startswith("2.") or find is None:
        return
    found: dict[str, Any] = {}

    def find_proxied(run_id: str) -> Any:
        if run_id not in found:
            place = client.get_run(run_id).info.artifact_uri
            if not place.startswith(_PROXIED):
                return find(run_id)
            proxied = importlib.import_module("mlflow.store.artifact.mlflow_artifacts_repo")
            plain = importlib.import_module("mlflow.store.artifact.http_artifact_repo")
            resolved = proxied.MlflowArtifactsRepository.resolve_uri(place, uri)
            found[run_id] = plain.HttpArtifactRepository(resolved)
        return found[run_id]

    tracking._get_artifact_repo = find_proxied
