"""Models by the flavour that the user names: an MLmodel file beside what was saved.

A directory that MLflow itself has saved is a model already. Of a file, two flavours are
known, `pytorch` (a whole module, as `torch.save` writes it) and `sklearn` (a pickle).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from quark_core.api import ArtifactRecord

FLAVOURS = ("pytorch", "sklearn")
_MAX_TOLD = 50


def find_flavour(record: ArtifactRecord) -> str | None:
    """The flavour that a file's metadata names, where a model can be made of it."""
    metadata: Mapping[str, Any] = record.metadata or {}
    named = metadata.get("flavor", metadata.get("flavour"))
    is_file = record.payload_format == "bytes" and record.artifact_type != "directory_file"
    return named if is_file and named in FLAVOURS else None


def make_model_files(record: ArtifactRecord, flavour: str) -> tuple[str, str, dict[str, str]]:
    """The MLmodel of a file, the file's own name in the model's folder, and further files."""
    created = datetime.fromtimestamp(record.time_us / 1e6, UTC)
    if flavour == "pytorch":
        own = {"code": None, "model_data": "data", "pytorch_version": _find_version("torch")}
        general = {
            "data": "data",
            "loader_module": "mlflow.pytorch",
            "pickle_module_name": "pickle",
        }
        name = "data/model.pth"
        others = {"data/pickle_module_info.txt": "pickle"}
    else:
        own = {
            "code": None,
            "pickled_model": "model.pkl",
            "serialization_format": "pickle",
            "sklearn_version": _find_version("scikit-learn"),
        }
        general = {
            "loader_module": "mlflow.sklearn",
            "model_path": "model.pkl",
            "predict_fn": "predict",
        }
        name, others = "model.pkl", {}
    described = {
        "flavors": {"python_function": general, flavour: own},
        "mlflow_version": _find_version("mlflow") or _find_version("mlflow-skinny"),
        "model_uuid": record.sha256[:32],
        "utc_time_created": created.strftime("%Y-%m-%d %H:%M:%S.%f"),
    }
    # JSON is YAML.
    return json.dumps(described, indent=2) + "\n", name, others


def describe_models(known: str, models: Mapping[str, str], mlflow_run_id: str) -> str:
    """The tag by which MLflow's page lists a run's models, with further ones.

    Args:
        known: The tag as it is, or "".
        models: Folder of each new model -> its MLmodel.
        mlflow_run_id: The MLflow run.
    """
    yaml: Any = importlib.import_module("yaml")  # MLflow itself needs it
    try:
        found = json.loads(known) if known else []
    except ValueError:
        found = []
    told = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    told = [each for each in told if each.get("artifact_path") not in models]
    for folder, text in models.items():
        try:
            said = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        said = said if isinstance(said, dict) else {}
        flavours = said.get("flavors")
        told.append(
            {
                "run_id": mlflow_run_id,
                "artifact_path": folder,
                "utc_time_created": str(said.get("utc_time_created", "")),
                "model_uuid": str(said.get("model_uuid", "")),
                "flavors": flavours if isinstance(flavours, dict) else {},
            }
        )
    return json.dumps(told[-_MAX_TOLD:], default=str)


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
