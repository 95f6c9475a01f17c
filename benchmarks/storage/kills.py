"""SIGKILL in the middle of compaction, while another process reads all the time."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, print_figures

from quark_backends.store.databases.sqlite import connect
from quark_core.records.query import Query
from storage.stores import RUN_ID, BenchStore, make_losses, make_metric_batches, name_keys

_KEYS, _STEPS_A_BATCH, _BATCHES_A_KILL = 5, 4, 40
_LONGEST_LIFE_S = 0.05
_COMPACT = """
import sys
from pathlib import Path
from quark_backends.store.upkeep import compaction
from quark_backends.store.databases.sqlite import connect, find_store
compaction._TURN_BATCHES = 3  # many turns, so that a kill comes in the middle of one
connection = connect(find_store(Path(sys.argv[1])))
compactor = compaction.Compactor(connection)
print("ready", flush=True)
while True:
    for work in compactor.find_work(minimum=2):
        compactor.compact(work)
"""
# Reads until it is told to stop, and notes: reads, wrong ones, those beside compaction only.
_READ = """
import mmap, sys
from pathlib import Path
from quark_backends.store.databases.sqlite import connect, find_store
from quark_backends.store.reading.reader import StoreReader
from quark_core.records.query import Query
layout, run_id, keys = find_store(Path(sys.argv[1])), sys.argv[3], int(sys.argv[4])
with open(sys.argv[2], "r+b") as file:
    shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
reader = StoreReader(lambda: connect(layout, read_only=True))
while not shared[2]:
    acknowledged = shared[0]
    columns = reader.read(run_id, "metric", Query())
    begun = shared[1]
    steps = columns["step"].tolist()
    whole = acknowledged <= len(steps) <= begun
    whole = whole and steps == [step for step in range(len(steps) // keys) for _ in range(keys)]
    shared[3] += 1
    shared[4] += not whole
    shared[5] += acknowledged == begun
    if shared[3] == 1:
        print("ready", flush=True)
"""


def measure_kills(*, quick: bool) -> dict[str, float]:
    kills = 10 if quick else 100
    chance = random.Random(0)
    steps = kills * _BATCHES_A_KILL * _STEPS_A_BATCH
    values = make_losses(steps, _KEYS)
    batches = list(make_metric_batches(values, rows=_KEYS * _STEPS_A_BATCH))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name, "store"), Path(name, "ledger")
        store = BenchStore(folder, durable=True)
        ledger.write_bytes(bytes(8 * 6))
        with ledger.open("r+b") as file:
            shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        watcher: subprocess.Popen[str] | None = None
        for kill in range(kills):
            part = batches[kill * _BATCHES_A_KILL :][:_BATCHES_A_KILL]
            stored = shared[0] + sum(batch.count for batch in part)
            shared[1] = stored
            store.ingest.write(part)
            shared[0] = stored
            if watcher is None:
                watcher = _start(_READ, folder, ledger, RUN_ID, _KEYS)
            before = _count_waiting(store)
            _kill_compaction(folder, chance.uniform(0.0, _LONGEST_LIFE_S))
            counts["in the middle"] += 0 < _count_waiting(store) < before
            _count_points(store, values[: stored // _KEYS], counts)
        assert watcher is not None
        shared[2] = 1
        watcher.communicate(timeout=60)
        counts["reads"], counts["wrong reads"], counts["reads beside"] = shared[3:6].tolist()
        shared.release()
        store.compact()
        store.close()
        store.connection = connect(store.layout)
        _count_points(store, values, counts)
        store.close()
    return print_figures(
        f"SIGKILL in the middle of compaction, {kills} times; each time all points are compared",
        [
            Figure("kills", kills),
            Figure("kills with some batches compacted and some not", counts["in the middle"]),
            Figure("points in the end", values.size),
            Figure("points lost", counts["lost"], at_most=0),
            Figure("points duplicated", counts["duplicated"], at_most=0),
            Figure("points with another value", counts["altered"], at_most=0),
            Figure("integrity_check or foreign_key_check failed", counts["broken"], at_most=0),
            Figure("reads by another process meanwhile", counts["reads"]),
            Figure("of these beside compaction alone", counts["reads beside"]),
            Figure("reads with another total", counts["wrong reads"], at_most=0),
        ],
    )


def _start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that has said that it is ready."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        raise RuntimeError(f"a process ended by itself ({child.wait()})")
    return child


def _kill_compaction(folder: Path, life_s: float) -> None:
    child = _start(_COMPACT, folder)
    time.sleep(life_s)
    if child.poll() is not None:
        raise RuntimeError(f"the compacting process ended by itself ({child.returncode})")
    child.kill()
    child.communicate()


def _count_waiting(store: BenchStore) -> int:
    (count,) = store.connection.execute(
        "SELECT count(*) FROM batch WHERE kind = 'metric'"
    ).fetchone()
    return int(count)


def _count_points(store: BenchStore, values: Any, counts: Counter[str]) -> None:
    """Compare what is stored with what was logged."""
    keys = name_keys(_KEYS)
    reader = store.open_reader()
    for index, key in enumerate(keys):
        columns = reader.read(RUN_ID, "metric", Query(equals={"metric_key": key}))
        steps, found = columns["step"], columns["value"]
        distinct, first = np.unique(steps, return_index=True)
        counts["lost"] += len(values) - len(distinct)
        counts["duplicated"] += len(steps) - len(distinct)
        counts["altered"] += int((found[first] != values[distinct, index]).sum())
    reader.close()
    checks = store.connection.execute("PRAGMA integrity_check").fetchall()
    foreign = store.connection.execute("PRAGMA foreign_key_check").fetchall()
    counts["broken"] += checks != [("ok",)] or foreign != []
