"""What the parts share: where points are, and tables."""

from __future__ import annotations

import contextlib
import csv
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import quark

Row = dict[str, Any]
Points = Counter[tuple[str, int]]
"""How often each point is somewhere, by key and step."""


def read_store(folder: Path, run_id: str) -> Points:
    columns = quark.MetricsLogger(quark.open_run(run_id, folder)).columns()
    return Counter(zip(columns["metric_key"].tolist(), columns["step"].tolist(), strict=True))


def read_csv(folder: Path, run_id: str) -> Points:
    path = folder / run_id / "metrics_long.csv"
    if not path.exists():
        return Counter()
    with path.open(newline="") as file:
        return Counter((row["key"], int(row["step"])) for row in csv.DictReader(file))


def count_extra(points: Points) -> int:
    """How many points are there again."""
    return points.total() - len(points)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
