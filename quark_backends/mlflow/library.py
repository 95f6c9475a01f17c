"""Imports MLflow, late, with what keeps it out of the training's way."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from quark_backends.mlflow.errors import Missing, Refused, translate, unavailable, unusable
from quark_backends.mlflow.new_database import make_database
from quark_backends.mlflow.server import Server
from quark_core.api import importing, redact_text

_log = logging.getLogger("quark")
_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_CREDENTIALS = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_AUTH",
)
_SQLITE = "sqlite:///"


def find_uri(location: str) -> str:
    """The tracking URI that a backend's location means.

    Raises:
        BackendUnusable: None is given, here or in the environment.
    """
    uri = location or os.environ.get(_URI_VARIABLE, "").strip()
    if not uri:
        raise unusable(
            f"no MLflow server is named: set {_URI_VARIABLE} or write backends="
            '"mlflow+http://HOST:PORT"; the records wait'
        )
    return uri


def check_credentials_are_for(uri: str) -> None:
    """See that MLflow's credentials may be shown to a server that a run's folder names.

    MLflow shows those of the environment to any server; they are for that of
    MLFLOW_TRACKING_URI, where that is set.

    Raises:
        BackendUnusable: They are for another server.
    """
    own = os.environ.get(_URI_VARIABLE, "").strip()
    has_any = any(os.environ.get(name, "").strip() for name in _CREDENTIALS)
    if not own or not has_any or "://" not in uri or _find_origin(own) == _find_origin(uri):
        return
    raise unusable(
        f"the run's folder names the server {redact_text(uri)}, but the credentials in "
        f"MLFLOW_TRACKING_* are for that of {_URI_VARIABLE}, and are sent to no other: set both to "
        "those of that server and come again"
    )


def _find_origin(uri: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(uri)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme.lower())
    except ValueError:
        return uri, "", None
    return parts.scheme.lower(), (parts.hostname or "").lower(), port


def open_server(uri: str, *, read_only: bool = False) -> Server:
    """A tracking server or store; nothing is asked of a server yet.

    Args:
        uri: Its tracking URI.
        read_only: Make no store where there is none.

    Raises:
        BackendUnusable: MLflow is not installed.
        BackendUnavailable: It does not open it.
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
        path = _find_sqlite_file(uri)
        if path is not None and not read_only:
            make_database(path, lambda scratch: Server(mlflow, scratch))
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
    name = uri.removeprefix(_SQLITE).partition("?")[0]
    if not uri.startswith(_SQLITE) or not name or name.startswith((":memory:", "file:")):
        return None
    return Path(name)


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
        raise unusable(
            'mlflow is not installed: pip install "quark-tracker[mlflow]"; the records wait'
        ) from error
    except Exception as error:
        # Foreign code: a wrong protobuf ends in a TypeError, for one.
        raise unavailable(
            f"MLflow is installed but cannot be imported ({type(error).__name__}: {error})"
        ) from error
    return mlflow
