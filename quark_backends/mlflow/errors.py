"""What a call to MLflow can end in, told apart by what is to be done about it.

Refused              the call itself is bad: find the bad part, leave it out
Missing              what it names is not there
AlreadyExists        what it makes is there already
BackendUnavailable   everything else: wait and call again

Single records that are refused go into a file of the run's quarantine.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import msgspec

from quark_core.api import BackendUnauthorized, BackendUnavailable, BackendUnusable, redact_text

_REFUSED = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST"})
_CREDENTIALS = frozenset({"UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"})
# Addresses of objects differ at each try, but a reason is logged once only where it is the same.
_VARYING = re.compile(r" object at 0x[0-9a-fA-F]+|\([^()]*0x[0-9a-fA-F]+[^()]*\)")
_MAX_REASON = 700
_HTTP_CODE = re.compile(r"failed with error code (\d{3})")
# Refused by what stands before the server too, such as a proxy that a request is too large for.
_REFUSED_HTTP = frozenset({400, 405, 406, 411, 413, 414, 415, 422, 431})


class Refused(Exception):
    """MLflow will never take this call."""


class Missing(Exception):
    """MLflow does not know the run or experiment that a call names."""


class AlreadyExists(Exception):
    """MLflow has one of that name."""


def unavailable(message: str) -> BackendUnavailable:
    """The error that makes the lane call again later."""
    return BackendUnavailable(message, backend="mlflow")


def unusable(message: str) -> BackendUnusable:
    """The error that makes the lane wait for a person."""
    return BackendUnusable(message, backend="mlflow")


def translate(error: Exception, uri: str) -> Exception:
    """The error to raise in place of one that the MLflow client has raised.

    Args:
        error: It.
        uri: The tracking URI, as it may be shown.
    """
    code = getattr(error, "error_code", None)
    status = _find_status(error)
    reason = _shorten(str(error) or type(error).__name__)
    if code in _REFUSED or status in _REFUSED_HTTP:
        return Refused(reason)
    if code == "RESOURCE_DOES_NOT_EXIST" or (code is None and status == 404):
        return Missing(reason)
    if code == "RESOURCE_ALREADY_EXISTS":
        return AlreadyExists(reason)
    if code in _CREDENTIALS or (code is None and status in (401, 403)):
        return BackendUnauthorized(
            f"the MLflow server {uri} refused the credentials ({code}): set MLFLOW_TRACKING_TOKEN, "
            "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; the records wait",
            backend="mlflow",
        )
    if code == "ENDPOINT_NOT_FOUND":
        return unavailable(f"{uri} does not answer as an MLflow server: check the address")
    if code is None and isinstance(error, (TypeError, ValueError, OverflowError)):
        # The client could not even write the request down.
        return Refused(f"{type(error).__name__}: {reason}")
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OSError):
        # The connection itself failed; the text of that differs at each try.
        many = re.search(r"too many \d+ error responses", str(cause))
        what = many[0] if many else type(cause).__name__
        return unavailable(f"the MLflow server {uri} cannot be reached ({what})")
    return unavailable(f"the MLflow server {uri} cannot take records now: {reason}")


def _find_status(error: Exception) -> int | None:
    """The HTTP status that an error tells of, or None."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    found = _HTTP_CODE.search(str(error))
    return int(found[1]) if found else None


def _shorten(text: str) -> str:
    # What follows "[SQL:" are the statement and its values.
    line = " ".join(_VARYING.sub("", redact_text(text)).partition("[SQL:")[0].split())
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "…"


_log = logging.getLogger("quark")


class RefusedRecords:
    """`refused-records.jsonl`: one refused record per line, with the reason.

    A batch that is tried again may put its refused records there again; their
    `id` tells.

    Args:
        folder: The mirror's folder in the run's quarantine; made when needed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "refused-records.jsonl"
        self._reasons: set[str] = set()

    def add(self, kind: str, record: dict[str, Any], reason: str) -> None:
        """Keep a record and why it was refused.

        Args:
            kind: What was refused: `metric`, `param` or `tag`.
            record: It, as JSON-like values.
            reason: What MLflow said.
        """
        if kind not in self._reasons:
            self._reasons.add(kind)
            _log.warning(
                "backend mlflow: the server refused a %s, which is kept in %s (%s)",
                kind,
                self._path,
                reason,
            )
        # msgspec writes NaN and the infinities as null.
        record = {key: str(v) if isinstance(v, float) else v for key, v in record.items()}
        line = msgspec.json.encode({"kind": kind, "reason": reason, "record": record})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line + b"\n")
