"""Text samples of a run: found, ordered, in pages; and one of them in full, beside the curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.page.routes.parameters import MAX_ROWS, Parameters
from quark_core.errors import SchemaValidationError
from quark_core.records import MetricRecord
from quark_core.records.kinds.samples import SampleRecord
from quark_core.records.names import decode_name
from quark_core.records.query import Query
from quark_core.runs.reading import read_rows
from quark_core.runs.sample_search import SampleFilter, list_columns, order_samples

if TYPE_CHECKING:
    from quark.page.routes.page_source import PageSource
    from quark_core.records.columns import Columns

_ROWS = 50
_MOST_FIRST = 10_000_000
_MOST_CONDITIONS = 20
# Of a longer text a list shows the beginning.
_SHOWN_CHARACTERS = 300
_MOST_SETS = 100
_MOST_VALUES = 30
_MOST_LOOKED_UP = 12
_SYSTEM = ("system/", "quark/")


def list_samples(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """A page of the rows that fit, the newest first or in the order that is asked for.

    Raises:
        SchemaValidationError: A bad parameter.
        RunNotFoundError: There is no such run.
    """
    wanted = SampleFilter.build(
        parameters.get_text("text"), parameters.get_texts("where", _MOST_CONDITIONS)
    )
    sort = parameters.get_text("sort")
    near = parameters.get_integer("near")
    first = parameters.get_integer("first") or 0
    if first > _MOST_FIRST:
        raise SchemaValidationError(f"first must be at most {_MOST_FIRST}, got {first}")
    limit = parameters.get_bounded("limit", _ROWS, MAX_ROWS)
    name = parameters.get_text("set")
    query = Query.build(
        equals={"set_name": name},
        step_min=parameters.get_integer("step_min"),
        step_max=parameters.get_integer("step_max"),
    )
    rows = read_rows(source.reader, run_id, SampleRecord.KIND, query)
    places = wanted.match(rows)
    found = rows if places is None else rows.take(places)
    is_descending = parameters.get_flag("descending")
    order = order_samples(found, sort, descending=is_descending, near=near)
    shown = found.take(order[first : first + limit])
    return {
        "count": found.count,
        "total": rows.count,
        "sets": sorted(set(rows["set_name"].tolist()))[:_MOST_SETS],
        "columns": list_columns(shown),
        "rows": [_describe(record) for record in shown.to_records()],
    }


def tell_sample(source: PageSource, run_id: str, parameters: Parameters) -> dict[str, Any]:
    """One row in full, and what the curves are at its step.

    Raises:
        SchemaValidationError: A bad parameter, or there is no such row.
        RunNotFoundError: There is no such run.
    """
    wanted = parameters.get_text("id")
    step = parameters.get_integer("step")
    writer_id, _, number = (wanted or "").rpartition(f"-{SampleRecord.KIND}-")
    if not writer_id or not number.isdecimal():
        raise SchemaValidationError("id must be the ID of a sample")
    rows = read_rows(source.reader, run_id, SampleRecord.KIND, Query(step=step, all_attempts=True))
    its = (rows["writer_id"] == writer_id) & (rows["sequence"] == int(number))
    found: Any = rows.take(its).to_records()
    if not found:
        raise SchemaValidationError(f"this step has no sample {wanted!r:.80}")
    record = found[0]
    return {
        "sample": _describe(record, is_whole=True),
        "values": [] if record.step is None else _list_values(source, run_id, record),
    }


def _describe(record: Any, *, is_whole: bool = False) -> dict[str, Any]:
    long: list[str] = []

    def show(name: str, value: Any) -> Any:
        if is_whole or not isinstance(value, (str, list, dict)):
            return value
        if isinstance(value, str) and len(value) <= _SHOWN_CHARACTERS:
            return value
        if not isinstance(value, str) and len(text := str(value)) <= _SHOWN_CHARACTERS:
            return value
        text = value if isinstance(value, str) else str(value)
        long.append(name)
        return text[:_SHOWN_CHARACTERS]

    return {
        "id": record.id,
        "set": record.set_name,
        "step": record.step,
        "epoch": record.epoch,
        "rank": record.rank,
        "attempt": record.attempt,
        "at": record.timestamp,
        "prompt": show("prompt", record.prompt),
        "completion": show("completion", record.completion),
        "reward": record.reward,
        "columns": {name: show(name, value) for name, value in (record.columns or {}).items()},
        "cut": record.cut,
        "long": long,
    }


def _list_values(source: PageSource, run_id: str, record: SampleRecord) -> list[dict[str, Any]]:
    """What was logged of metrics at a sample's step, or last before it."""
    step = record.step
    at_step = read_rows(source.reader, run_id, MetricRecord.KIND, Query(step=step))
    values: dict[str, tuple[float, int]] = {}
    for key, value in zip(at_step["metric_key"].tolist(), at_step["value"].tolist(), strict=True):
        values[key] = (value, int(step or 0))
    keys = [key for key in source.summarize(run_id).metrics if not key.startswith(_SYSTEM)]
    missing = [key for key in keys if key not in values][:_MOST_LOOKED_UP]
    for key in missing:
        query = Query(equals={"metric_key": key}, step_max=step, limit=1)
        before: Columns = read_rows(source.reader, run_id, MetricRecord.KIND, query)
        if before.count:
            values[key] = (float(before["value"][-1]), int(before["step"][-1]))
    shown = [key for key in keys if key in values][:_MOST_VALUES]
    return [
        {"key": key, "name": decode_name(key), "value": values[key][0], "step": values[key][1]}
        for key in shown
    ]
