"""SIGKILL: what had been logged, and what is there after the journal was delivered."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from durability.points import Row, count_extra, print_table, read_csv, read_store
from quark_core import recovery

# Name, pause, calls between two pauses, longest life in seconds.
PACES = (("tight", 0.002, 50, 1.5), ("5 ms", 0.005, 1, 1.5), ("100 ms", 0.1, 1, 2.5))
KILL_AT_ONCE = 2
LEDGER_CALLS = 250_000
PROGRAM = """
import mmap, sys, time, quark
folder, ledger, pause_s, burst = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
with open(ledger, "r+b") as file:
    shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
session = quark.start_run(project="killed", storage_dir=folder, backends="csv:mirror")
log = quark.MetricsLogger(session).log
print(session.run_id, flush=True)
for step in range(len(shared) - 1):
    shared[step + 1] = log("m", float(step), step=step).time_us
    shared[0] = step + 1
    if (step + 1) % burst == 0:
        time.sleep(pause_s)
time.sleep(60)
"""


@dataclass(slots=True)
class Kill:
    """What one kill cost."""

    logged: int
    recovered: int
    lost: int
    window_ms: float
    duplicated: int
    holes: int
    mirror_differs: int
    waiting: int


def kill_once(pause_s: float, burst: int, life_s: float) -> Kill:
    """Start a child, kill it after a while, deliver its journal, and count."""
    with tempfile.TemporaryDirectory() as name:
        folder, ledger = Path(name, "store"), Path(name, "ledger")
        with ledger.open("wb") as file:
            file.truncate(8 * (LEDGER_CALLS + 1))
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder, ledger, str(pause_s), str(burst)],
            stdout=subprocess.PIPE,
            text=True,
        )
        with ledger.open("rb") as file:
            shared = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        view = memoryview(shared).cast("q")
        assert child.stdout is not None
        run_id = child.stdout.readline().strip()
        while not view[0]:
            if child.poll() is not None:
                raise RuntimeError(f"the logging process ended by itself ({child.returncode})")
            time.sleep(0.001)
        time.sleep(life_s)
        moment_us = time.time_ns() // 1000
        child.kill()
        child.communicate()
        times_us = view[1 : view[0] + 1].tolist()
        view.release()
        shared.close()

        recovery.sync(folder)
        store, mirror = read_store(folder, run_id), read_csv(folder / "mirror", run_id)
        waiting = sum(lane.waiting for lane in recovery.survey(folder))
    lost = [step for step in range(len(times_us)) if ("m", step) not in store]
    # The child was alive when it was killed, and when its last call returned.
    died_us = max(moment_us, times_us[-1])
    return Kill(
        logged=len(times_us),
        recovered=len(store),
        lost=len(lost),
        window_ms=(died_us - times_us[lost[0]]) / 1000 if lost else 0.0,
        duplicated=count_extra(store) + count_extra(mirror),
        holes=0 if not store else max(step for _, step in store) + 1 - len(store),
        mirror_differs=len(store.keys() ^ mirror.keys()),
        waiting=waiting,
    )


def measure_kills(*, quick: bool) -> list[Row]:
    kills = 12 if quick else 200
    chance = random.Random(0)
    plan = [(PACES[index % len(PACES)], chance.random()) for index in range(kills)]
    found: dict[str, list[Kill]] = {name: [] for name, *_ in PACES}
    with ThreadPoolExecutor(KILL_AT_ONCE) as pool:
        tasks = [
            (pace[0], pool.submit(kill_once, pace[1], pace[2], 0.02 + share * (pace[3] - 0.02)))
            for pace, share in plan
        ]
        for done, (name, task) in enumerate(tasks, 1):
            found[name].append(task.result())
            if done % 20 == 0:
                print(f"{done} of {kills} kills", file=sys.stderr, flush=True)
    rows = [_sum_up_kills(name, results) for name, results in found.items()]
    rows.append(_sum_up_kills("all", [one for results in found.values() for one in results]))
    print_table("SIGKILL: what log() had returned for, and what was there after a sync", rows)
    return rows


def _sum_up_kills(name: str, kills: list[Kill]) -> Row:
    def total(field_name: str) -> int:
        return sum(getattr(kill, field_name) for kill in kills)

    return {
        "pace": name,
        "kills": len(kills),
        "logged": total("logged"),
        "recovered": total("recovered"),
        "lost": total("lost"),
        "lost median": float(median(kill.lost for kill in kills)),
        "lost max": max(kill.lost for kill in kills),
        "window median ms": median(kill.window_ms for kill in kills),
        "window max ms": max(kill.window_ms for kill in kills),
        "duplicated": total("duplicated"),
        "holes": total("holes"),
        "CSV differs": total("mirror_differs"),
        "left waiting": total("waiting"),
    }
