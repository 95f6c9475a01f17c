"""Pictures among a run's artifacts: of each name the newest one up to a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quark.page.api.media import describe_over
from quark.page.api.records import IMAGES, Looks, describe_artifact
from quark_core.records import ArtifactRecord
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.artifact_versions import HIDDEN_TYPES
from quark_core.runs.reading import read_rows

if TYPE_CHECKING:
    from quark.page.api.parameters import Parameters
    from quark.page.api.source import PageSource

_MOST_RECORDS = 20_000
_MOST_STEPS = 2_000
_MOST_NAMES = 60
_DRAWN_TYPES = ("image", "figure")


def list_images(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """The steps at which there are pictures, and of each name the newest up to one of them.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    at = parameters.get_integer("at")
    text = (parameters.get_text("text") or "").lower()
    source.load_run(run_id)
    rows = read_rows(source.reader, run_id, ArtifactRecord.KIND, Query())
    left_out = max(0, rows.count - _MOST_RECORDS)
    records: Any = rows.take(slice(left_out, rows.count)).to_records()
    found = list(_find_images(source, run_id, records, text))
    steps = sorted({record.step for record in found if record.step is not None})
    newest: dict[str, ArtifactRecord] = {}
    for record in sorted(found, key=lambda record: -1 if record.step is None else record.step):
        if record.step is None or at is None or record.step <= at:
            newest[record.artifact_key] = record
    shown = [newest[key] for key in sorted(newest)]
    # Evenly, with the first and the last one.
    stride = -(-len(steps) // _MOST_STEPS) or 1
    return {
        "steps": steps[-1::-stride][::-1],
        "step_count": len(steps),
        "images": [
            {**describe_artifact(source, run_id, record), **describe_over(record)}
            for record in shown[:_MOST_NAMES]
        ],
        "count": len(shown),
        "left_out": left_out,
    }


def _find_images(
    source: PageSource, run_id: str, records: Any, text: str
) -> Iterator[ArtifactRecord]:
    looks = Looks(source, run_id)
    for record in records:
        if record.artifact_type in HIDDEN_TYPES:
            continue
        if text and text not in decode_name(record.artifact_key).lower():
            continue
        noted: Mapping[str, Any] = record.metadata or {}
        media_type = noted.get("media_type")
        if media_type is None and record.artifact_type in _DRAWN_TYPES:
            media_type = describe_artifact(source, run_id, record, looks)["media_type"]
        if media_type in IMAGES and record.payload_relative_path is not None:
            yield record
