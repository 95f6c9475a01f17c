"""Imports MLflow, late, with what keeps it out of the training's way."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from types import ModuleType

from quark_backends.mlflow.errors import Missing, Refused, translate, unavailable
from quark_backends.mlflow.server import Server
from quark_core.forking import importing
from quark_core.redaction import redact_text

__all__ = ["find_uri", "open_server"]

_log = logging.getLogger("quark")
_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"


def find_uri(location: str) -> str:
    """The tracking URI that a backend's location means.

    Raises:
        BackendUnavailable: None is given, here or in the environment.
    """
    uri = location or os.environ.get(_URI_VARIABLE, "").strip()
    if not uri:
        raise unavailable(
            f"no MLflow server is named: set {_URI_VARIABLE} or write backends="
            '"mlflow+http://HOST:PORT"; the records wait'
        )
    return uri


def open_server(uri: str, *, read_only: bool = False) -> Server:
    """A tracking server or store; nothing is asked of a server yet.

    Args:
        uri: Its tracking URI.
        read_only: Make no store where there is none.

    Raises:
        BackendUnavailable: MLflow is not installed, or does not open it.
    """
    if read_only and (missing := _find_missing_store(uri)) is not None:
        raise unavailable(f"there is no MLflow store at {missing}")
    mlflow = _import_mlflow()
    if _is_folder(uri) and not read_only:
        _log.warning(
            "backend mlflow: %s is a folder, which MLflow only maintains and which may keep points "
            "twice; mlflow+sqlite:///FILE keeps them once",
            uri,
        )
    try:
        return Server(mlflow, uri, _find_artifact_root(uri))
    except (Refused, Missing) as error:
        raise unavailable(f"MLflow does not open {redact_text(uri)}: {error}") from error


def _is_folder(uri: str) -> bool:
    return uri.startswith("file:") or ("://" not in uri and Path(uri).is_absolute())


def _find_artifact_root(uri: str) -> str | None:
    """Beside a SQLite file; MLflow would make a folder in the working directory."""
    path = _find_sqlite_file(uri)
    return None if path is None else (path.resolve().parent / "mlartifacts").as_uri()


def _find_sqlite_file(uri: str) -> Path | None:
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0])


def _find_missing_store(uri: str) -> Path | None:
    """Where a store of files would be made, were it opened; MLflow makes one for whoever reads."""
    path = _find_sqlite_file(uri)
    if path is None and _is_folder(uri):
        path = Path(uri.removeprefix("file:").removeprefix("//"))
    return None if path is None or path.exists() else path


class _QuietLane(logging.Filter):
    """Drops what lanes make urllib3 say: the lane itself reports an outage, once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is said."""
        return not (record.threadName or "").startswith("quark-lane-")


_QUIET_LANE = _QuietLane()


def _import_mlflow() -> ModuleType:
    logging.getLogger("urllib3.connectionpool").addFilter(_QUIET_LANE)
    try:
        mlflow = importlib.import_module("mlflow")
        with importing():
            importlib.import_module("mlflow.entities")
    except ModuleNotFoundError as error:
        if error.name != "mlflow":
            raise translate(error, "") from error
        raise unavailable(
            'MLflow is not installed: pip install "quark-tracker[mlflow]"; the records wait'
        ) from error
    except Exception as error:
        # Foreign code: a wrong protobuf ends in a TypeError, for one.
        raise unavailable(
            f"MLflow is installed but cannot be imported ({type(error).__name__}: {error})"
        ) from error
    return mlflow
