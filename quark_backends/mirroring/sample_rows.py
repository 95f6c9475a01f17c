"""Text samples as the columns and rows of a table, as MLflow and W&B have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quark_core.api import SampleRecord

_FIXED = ("prompt", "completion", "reward")


def tabulate_samples(
    records: Sequence[SampleRecord],
) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Columns and rows of samples of one set; a column that no row fills is left out.

    Objects and lists in cells are JSON, as text.
    """
    fixed = [name for name in _FIXED if any(getattr(one, name) is not None for one in records)]
    others: dict[str, None] = {}
    for record in records:
        columns: Mapping[str, Any] = record.columns or {}
        others.update(dict.fromkeys(columns))
    # A column may be called like one of ours.
    own = [name for name in others if name not in fixed]
    rows = []
    for record in records:
        columns = record.columns or {}
        cells = [getattr(record, name) for name in fixed]
        rows.append((*cells, *(_settle(columns.get(name)) for name in own)))
    return (*fixed, *own), tuple(rows)


def _settle(value: Any) -> Any:
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=dict)
    return value
