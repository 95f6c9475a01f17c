"""Single records that MLflow refused, in a file of the run's quarantine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["RefusedRecords"]

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
