"""Stores of runs with summaries, filled by hand: as many and as odd as a test wants."""

import json
import math
from dataclasses import dataclass, field

from quark_backends.store.databases.sqlite import connect_memory
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.writing.summaries import write_config, write_tags
from quark_core.system.process import current_process

BASE_US = 1_767_225_600_000_000  # 2026-01-01T00:00:00Z
ELSEWHERE = {"host": "elsewhere", "pid": 1, "started": "1"}


@dataclass
class Run:
    """A run; what is not said is as in most runs."""

    id: str
    project: str = "vision"
    name: str | None = None
    notes: str | None = None
    status: str = "completed"
    attempt: int = 0
    parent: str | None = None
    git_commit: str | None = None
    tags: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)
    created_us: int = BASE_US
    updated_us: int = BASE_US
    ended_us: int | None = BASE_US + 60_000_000
    heartbeat_us: int = BASE_US + 30_000_000
    newest_step: int | None = None
    trashed: bool = False
    alive: bool = False
    # Stored key -> values in order; what is not finite is counted, as ingest does.
    metrics: dict[str, list[float]] = field(default_factory=dict)


class SearchStore:
    """A store in memory."""

    def __init__(self, runs):
        self.connection = connect_memory()
        self.finder = StoreReader(lambda: self.connection)
        for run in runs:
            self.add(run)

    def search(self, **arguments):
        """Ids of the runs that the store finds."""
        from quark_core.runs.run_search import build_search

        return [run.run_id for run in self.finder.search(build_search(**arguments))]

    def add(self, run):
        execute = self.connection.execute
        execute(
            "INSERT OR IGNORE INTO project (id, name, root_path, created_us, updated_us)"
            " VALUES (?, ?, '/runs', 0, 0)",
            (f"project-{run.project}", run.project),
        )
        process = current_process() if run.alive else None
        identity = (
            ELSEWHERE
            if process is None
            else {"host": process.host, "pid": process.pid, "started": process.started}
        )
        pk = execute(
            "INSERT INTO run (id, project_id, name, notes, status, attempt, parent_run_id,"
            " lineage_root_run_id, run_path, git_commit, strict_mode, tags, process, config,"
            " created_us, updated_us, ended_us, heartbeat_us, newest_step, trashed_us)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, '/runs/x', ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run.id,
                f"project-{run.project}",
                run.name,
                run.notes,
                run.status,
                run.attempt,
                run.parent,
                run.id,
                run.git_commit,
                json.dumps(sorted(run.tags)),
                json.dumps(identity),
                json.dumps({"values": run.config, "notes": []}),
                run.created_us,
                run.updated_us,
                run.ended_us,
                run.heartbeat_us,
                run.newest_step,
                1 if run.trashed else None,
            ),
        ).lastrowid
        write_tags(self.connection, pk, run.tags)
        write_config(self.connection, pk, run.config)
        for key, values in run.metrics.items():
            self._add_metric(pk, key, values)

    def _add_metric(self, run_pk, key, values):
        execute = self.connection.execute
        execute("INSERT OR IGNORE INTO name (text) VALUES (?)", (key,))
        (name_pk,) = execute("SELECT pk FROM name WHERE text = ?", (key,)).fetchone()
        finite = [value for value in values if math.isfinite(value)]
        execute(
            "INSERT INTO run_metric VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, 0)",
            (
                run_pk,
                name_pk,
                len(values),
                len(values) - len(finite),
                values[0] if math.isfinite(values[0]) else None,
                values[-1] if math.isfinite(values[-1]) else None,
                min(finite, default=None),
                max(finite, default=None),
                len(values) - 1,
            ),
        )
