"""SIGKILL in the middle of storing: what is listed afterwards loads and has its hash."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import print_rows

import quark
from quark_core.runs import recovery

PROGRAM = """
import random, sys
import quark
chance = random.Random(int(sys.argv[2]))
session = quark.start_run(project="killed", storage_dir=sys.argv[1])
store = quark.ArtifactStore(session)
print(session.run_id, flush=True)
for number in range(10**9):
    size = int(4 ** chance.uniform(0, 11.5))
    record = store.store("blob", f"part/{number % 7}", chance.randbytes(size), step=number)
    print(record.step, flush=True)
"""


def measure_kills(*, quick: bool) -> list[dict[str, Any]]:
    """Kill a storing process, deliver its journal, and load everything that is listed."""
    kills = 5 if quick else 50
    chance = random.Random(0)
    row = dict.fromkeys(
        ("kills", "returned", "listed", "loaded", "lost", "wrong hash", "begun and left"), 0
    )
    for number in range(kills):
        _kill(number, chance.uniform(0.02, 1.0), row)
    print_rows("SIGKILL in the middle of storing", [row])
    return [row]


def _kill(number: int, life_s: float, row: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name, str(number)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        run_id = child.stdout.readline().strip()
        child.stdout.readline()  # the first is stored
        time.sleep(life_s)
        child.kill()
        returned = 1 + len(child.communicate()[0].splitlines())
        recovery.sync(Path(name))
        store = quark.ArtifactStore(quark.open_run(run_id, storage_dir=name))
        records = store.read()
        row["kills"] += 1
        row["returned"] += returned
        row["listed"] += len(records)
        row["lost"] += max(0, returned - len(records))
        for record in records:
            data = store.load(record)
            row["loaded"] += 1
            row["wrong hash"] += hashlib.sha256(data).hexdigest() != record.sha256
        partial = Path(name, ".quark", "runs", run_id, "artifacts", ".partial")
        row["begun and left"] += len(list(partial.glob("*")))
