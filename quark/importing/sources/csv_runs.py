"""Tables with a run in each row, as `mlflow.search_runs` gives them: parameters and last values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.importing.foreign import ForeignRun, Points, Portion, RunFacts
from quark.importing.losses import Losses
from quark.importing.sources.csv_forms import parse_moment

_STATUSES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "interrupted"}
_NAME_TAG = "tags.mlflow.runName"
_NOTE_TAG = "tags.mlflow.note.content"
_COMMIT_TAG = "tags.mlflow.source.git.commit"
_OWN_TAGS = "tags.mlflow."


def is_table_of_runs(header: Sequence[str]) -> bool:
    """Whether each row is a run."""
    return "run_id" in header and any(name.startswith(("params.", "metrics.")) for name in header)


def find_table_runs(
    path: Path, rows: Iterable[Mapping[str, str]], project: str
) -> Iterator[ForeignRun]:
    """The runs of a table."""
    for row in rows:
        if row.get("run_id"):
            yield TableRun(path, row, project)


class TableRun(ForeignRun):
    """One row; its position is which metrics were taken."""

    def __init__(self, path: Path, row: Mapping[str, str], project: str) -> None:
        self.key = f"{path}\0{row['run_id']}"
        self._path = path
        self._row = row
        self._project = project

    def describe(self) -> RunFacts:
        """See `ForeignRun`."""
        row = self._row
        return RunFacts(
            identity=row["run_id"],
            project=self._project,
            name=row.get(_NAME_TAG) or None,
            notes=row.get(_NOTE_TAG) or None,
            tags=[
                f"{name.removeprefix('tags.')}={text}"
                for name, text in row.items()
                if name.startswith("tags.") and not name.startswith(_OWN_TAGS) and text
            ],
            config={
                name.removeprefix("params."): _parse(text)
                for name, text in row.items()
                if name.startswith("params.") and text
            },
            environment={"csv": {"file": str(self._path)}},
            status=_STATUSES.get(row.get("status", "FINISHED"), "running"),
            started_us=parse_moment(row.get("start_time", "")),
            ended_us=parse_moment(row.get("end_time", "")),
            git_commit=row.get(_COMMIT_TAG) or None,
        )

    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """See `ForeignRun`."""
        import numpy as np

        taken = list(position.get("metrics", ()))
        found: dict[str, float] = {}
        for name, text in self._row.items():
            metric = name.removeprefix("metrics.")
            if metric == name or not text or metric in taken:
                continue
            try:
                found[metric] = losses.read_number("metric", metric, text)
            except ValueError:
                losses.add("metric", metric, "its value is no number")
        if not found:
            return
        time_us = self.describe().ended_us or round(self._path.stat().st_mtime * 1e6)
        count = len(found)
        losses.add("history", "metrics", "such a table has the last value of each only", count)
        yield Portion(
            position={"metrics": [*taken, *found]},
            points=Points(
                list(found),
                np.arange(count),
                np.zeros(count, np.int64),
                np.array(list(found.values())),
                np.full(count, time_us),
            ),
        )


def _parse(text: str) -> Any:
    from quark_backends.mlflow.reader import parse_param

    return parse_param(text)
