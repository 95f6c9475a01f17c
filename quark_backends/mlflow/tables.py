"""Tables of a run's records for other tools, made from closed segments.

    quark/tables/<kind>/<writer>-0001.parquet

Where pyarrow is not installed they are `.jsonl.gz`: one record a line, as
`to_dict()` says it, gzip'd.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quark_backends.mlflow.segments import SUFFIX, read_segment
from quark_core.records import EventRecord, LifecycleRecord, MetricRecord

if TYPE_CHECKING:
    from quark_core.columns import Columns

__all__ = ["encode_lines", "make_tables"]

# Those are in MLflow itself, or in events.jsonl.
_ELSEWHERE = frozenset({MetricRecord.KIND, EventRecord.KIND, LifecycleRecord.KIND})


def make_tables(segment: Path, run_id: str) -> list[tuple[str, bytes]]:
    """Path among the artifacts and content of each table that a segment gives.

    Raises:
        OSError: The segment cannot be read.
    """
    from quark_core.columns import Columns

    by_kind: dict[str, list[Columns]] = {}
    for batch in read_segment(segment.read_bytes(), run_id):
        if batch.kind not in _ELSEWHERE:
            origin = {name: getattr(batch, name) for name in ("run_id", "writer_id", "attempt")}
            columns = Columns.from_body(batch.decoded, {**origin, "rank": batch.rank})
            by_kind.setdefault(batch.kind, []).append(columns)
    stem = segment.name.removesuffix(SUFFIX)
    made = []
    for kind, parts in by_kind.items():
        ending, data = _write(Columns.concatenate(kind, parts))
        made.append((f"quark/tables/{kind}/{stem}.{ending}", data))
    return made


def _write(columns: Columns) -> tuple[str, bytes]:
    if importlib.util.find_spec("pyarrow") is None:
        return "jsonl.gz", gzip.compress(encode_lines(columns.to_records()), mtime=0)
    pa = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    parquet.write_table(columns.to_arrow(), sink, compression="zstd")
    return "parquet", sink.getvalue().to_pybytes()


def encode_lines(records: Sequence[object]) -> bytes:
    """Records as JSON lines; a value that is not finite is its name as text."""
    lines = [
        msgspec.json.encode({k: _spell(v) for k, v in record.to_dict().items()})  # type: ignore[attr-defined]
        for record in records
    ]
    return b"".join(line + b"\n" for line in lines)


def _spell(value: object) -> object:
    is_odd = isinstance(value, float) and (value != value or value in (float("inf"), -float("inf")))
    return str(value) if is_odd else value
