"""SIGKILL: what had been logged, and what is there after the journal was delivered.

Three loops (without a pause, in bursts of 15,000 calls, a call each 5 ms) log to the
embedded store or to a service, while the journal's disk is sound, gives EIO, is full,
or takes a part of each write and fails at one in three. Each is killed at a random
moment. A point is lost that `log()` had returned for and that no sync brings back.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from figures import print_rows
from serving.servers import Service

import quark
from durability.points import Row, count_extra, environment, read_csv, read_store
from quark_core.runs import recovery

# Name, calls between two pauses, pause in seconds, longest life in seconds.
LOOPS = (("tight", 0, 0.0, 1.5), ("bursts", 15_000, 0.2, 1.5), ("5 ms", 1, 0.005, 2.5))
FAULTS = ("none", "EIO", "ENOSPC", "short writes")
KILL_AT_ONCE = 2
PROGRAM = """
import errno, mmap, random, sys, time, quark
from quark_core.delivery.delivery_state import Files
folder, ledger, burst, pause_s, fault = sys.argv[1:6]
burst, pause_s = int(burst), float(pause_s)
if fault != "none":
    create, write, sync = Files.create, Files.write, Files.sync
    ours, chance = set(), random.Random(0)
    def fail(number):
        raise OSError(number, "injected")
    def create_failing(self, path):
        descriptor = create(self, path)
        # What lies in shared memory is no disk.
        (ours.discard if str(path).startswith("/dev/shm/") else ours.add)(descriptor)
        return descriptor
    def write_failing(self, descriptor, data):
        if descriptor not in ours:
            return write(self, descriptor, data)
        if fault == "EIO":
            fail(errno.EIO)
        if fault == "ENOSPC":
            write(self, descriptor, data[:len(data) // 2])
            fail(errno.ENOSPC)
        if chance.random() < 1 / 3:
            fail(errno.EIO)
        return write(self, descriptor, data[:max(1, int(len(data) * chance.random()))])
    def sync_failing(self, descriptor):
        if descriptor in ours and (fault != "short writes" or chance.random() < 1 / 3):
            fail(errno.EIO)
        sync(self, descriptor)
    Files.create, Files.write, Files.sync = create_failing, write_failing, sync_failing
with open(ledger, "r+b") as file:
    # One store of eight bytes; struct would clear them first, and a kill could come between.
    returned = memoryview(mmap.mmap(file.fileno(), 0))[:8].cast("q")
session = quark.start_run(project="killed", storage_dir=folder, backends="csv:mirror")
log = quark.MetricsLogger(session).log
print(session.run_id, flush=True)
step = 0
while True:
    log("m", float(step), step=step)
    step += 1
    returned[0] = step
    if burst and step % burst == 0:
        time.sleep(pause_s)
"""


@dataclass(slots=True)
class Kill:
    """What one kill cost."""

    logged: int
    stored: int
    lost: int
    duplicated: int
    told: int
    mirror_differs: int
    waiting: int
    in_memory_mb: float


def kill_once(burst: int, pause_s: float, life_s: float, fault: str) -> Kill:
    """Start a child, kill it after a while, deliver its journal, and count."""
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name, "store"), Path(name, "ledger")
        ledger.write_bytes(bytes(8))
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder, ledger, str(burst), str(pause_s), fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert child.stdout is not None
        run_id = child.stdout.readline().strip()
        with ledger.open("rb") as file:
            shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        while not any(shared[:8]):  # one byte of a map is a text, which is true
            if child.poll() is not None:
                raise RuntimeError(f"the logging process ended by itself ({child.returncode})")
            time.sleep(0.001)
        time.sleep(life_s)
        child.kill()
        child.communicate()
        logged = int.from_bytes(shared[:8], "little")
        shared.close()
        in_memory = measure_boxes(run_id)
        recovery.sync(folder)
        store, mirror = read_store(folder, run_id), read_csv(folder / "mirror", run_id)
        waiting = sum(lane.waiting for lane in recovery.survey(folder))
        told = count_told(folder, run_id)
    return Kill(
        logged=logged,
        stored=len(store),
        lost=sum(("m", step) not in store for step in range(logged)),
        duplicated=count_extra(store) + count_extra(mirror),
        told=told,
        mirror_differs=len(store.keys() ^ mirror.keys()),
        waiting=waiting,
        in_memory_mb=in_memory / 1e6,
    )


def measure_boxes(run_id: str) -> int:
    """Bytes that a run's process has left in shared memory."""
    boxes = Path("/dev/shm").glob(f"quark-{run_id}-*")
    return sum(path.stat().st_size for box in boxes for path in box.rglob("*") if path.is_file())


def count_told(folder: Path, run_id: str) -> int:
    """How many records the run itself says are lost."""
    events = quark.EventLogger(quark.open_run(run_id, folder)).read(event_type="records_dropped")
    payloads: list[dict[str, Any]] = [dict(event.payload or {}) for event in events]
    return sum(
        int(payload.get("at_most", 0)) + sum(payload.get("records", {}).values())
        for payload in payloads
    )


@contextlib.contextmanager
def open_place(primary: str) -> Iterator[None]:
    """Have runs go to the embedded store or to a service for a while."""
    if primary == "embedded":
        yield
        return
    with Service("SQLite") as service, environment(**service.environment):
        yield


def measure_kills(*, quick: bool) -> list[Row]:
    each = 1 if quick else 13
    chance = random.Random(0)
    faults = ("none", "EIO") if quick else FAULTS
    rows, everything = [], []
    for primary in ("embedded", "service"):
        with open_place(primary), ThreadPoolExecutor(KILL_AT_ONCE) as pool:
            for (name, burst, pause_s, life_s), fault in product(LOOPS, faults):
                lives = [0.02 + chance.random() * life_s for _ in range(each)]
                tasks = [pool.submit(kill_once, burst, pause_s, life, fault) for life in lives]
                kills = [task.result() for task in tasks]
                everything += kills
                rows.append(row := _sum_up_kills(name, fault, primary, kills))
                print(f"{len(everything)} kills; {row}", file=sys.stderr, flush=True)
    rows.append(_sum_up_kills("all", "", "", everything))
    print_rows("SIGKILL: what log() had returned for, and what was there after a sync", rows)
    return rows


def _sum_up_kills(name: str, fault: str, primary: str, kills: list[Kill]) -> Row:
    def total(field_name: str) -> int:
        return sum(getattr(kill, field_name) for kill in kills)

    return {
        "loop": name,
        "journal": fault,
        "primary": primary,
        "kills": len(kills),
        "logged": total("logged"),
        "stored": total("stored"),
        "lost": total("lost"),
        "twice": total("duplicated"),
        "told as lost": total("told"),
        "told too little": sum(max(0, kill.lost - kill.told) for kill in kills),
        "CSV differs": total("mirror_differs"),
        "left waiting": total("waiting"),
        "shared memory, MB at most": max(kill.in_memory_mb for kill in kills),
    }
