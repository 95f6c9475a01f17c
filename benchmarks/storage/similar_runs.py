"""Runs of the same digest among many, the best one, and whether a configuration was run before."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from pathlib import Path

from figures import Figure, print_figures, time_call

import quark
from quark_backends.store.databases.sqlite import connect, ensure_store
from quark_core.records import ProjectRecord
from quark_core.records.runs import digest_config, digest_structure
from storage.run_list import fill_runs

_GOAL_MS = 50
_PROBED = "run00000777"
_ALONE = "run00000778"
_LIMIT = 10


def measure_similar_runs(*, quick: bool) -> dict[str, float]:
    runs, times = (1_000, 3) if quick else (10_000, 15)
    with tempfile.TemporaryDirectory() as name:
        connection = connect(ensure_store(Path(name)))
        fill_runs(connection, runs)
        _add_digests(connection)
        connection.close()
        shown = []
        for by in ("structure", "config"):
            found = quark.find_similar_runs(_PROBED, by=by, limit=_LIMIT, storage_dir=name)
            assert [each.distance for each in found] == [0.0] * _LIMIT
            taken_s = time_call(
                lambda by=by: quark.find_similar_runs(
                    _PROBED, by=by, limit=_LIMIT, storage_dir=name
                ),
                times,
            )
            what = f"{_LIMIT} runs of the same {by}, ms"
            shown.append(Figure(what, taken_s * 1000, at_most=_GOAL_MS))
        near = quark.find_similar_runs(_ALONE, by="config", limit=_LIMIT, storage_dir=name)
        assert len(near) == _LIMIT
        assert near[-1].distance > 0.0
        taken_s = time_call(
            lambda: quark.find_similar_runs(_ALONE, by="config", limit=_LIMIT, storage_dir=name),
            times,
        )
        what = f"{_LIMIT} runs of which few have the same config, ms"
        shown.append(Figure(what, taken_s * 1000, at_most=_GOAL_MS))
        best_s = time_call(
            lambda: quark.best_run("val/metric7", mode="min", storage_dir=name), times
        )
        shown.append(Figure("the best run, ms", best_s * 1000, at_most=_GOAL_MS))
        config = {"lr": 1.0, "batch_size": 64, "seed": 1}
        plain_s = time_call(lambda: _start(name, config, None), times)
        asked_s = time_call(lambda: _start(name, config, "again"), times)
        shown.append(
            Figure(
                "start_run, more with if_exists, ms", (asked_s - plain_s) * 1000, at_most=_GOAL_MS
            )
        )
    return print_figures(f"Similar runs among {runs:,}, warm", shown)


def _start(storage_dir: str, config: dict[str, object], if_exists: str | None) -> None:
    quark.start_run(
        project="vision", config=config, if_exists=if_exists, storage_dir=storage_dir
    ).end_run()


def _add_digests(connection: sqlite3.Connection) -> None:
    """As the store makes them of runs that it takes in; one in a hundred has the probed config."""
    rows = connection.execute("SELECT pk, config FROM run").fetchall()
    (probed,) = connection.execute("SELECT config FROM run WHERE id = ?", (_PROBED,)).fetchone()
    # As start_run calls it, which is to find these runs.
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("BEGIN IMMEDIATE")
    project = ProjectRecord.derive_id("vision")
    connection.execute("UPDATE project SET id = ?", (project,))
    connection.execute("UPDATE run SET project_id = ?", (project,))
    for pk, config in rows:
        own = probed if pk % 100 == 0 else config
        values = json.loads(own)["values"]
        connection.execute(
            "UPDATE run SET config = ?, config_digest = ?, structure_digest = ? WHERE pk = ?",
            (own, digest_config(values), digest_structure(values), pk),
        )
    connection.execute("COMMIT")
