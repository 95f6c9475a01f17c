"""A full disk under the journal, and room again."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from figures import print_rows

import quark
from durability.points import (
    Row,
    count_extra,
    environment,
    read_csv,
    read_store,
)
from quark_core.config import settings

ROW_METRICS = tuple(f"train/metric{index}" for index in range(20))
MIB = 1024 * 1024
START_BYTES = MIB
"""Room for the journal before the disk is full."""
WRITTEN_AGAIN_S = 10.0
# Name, bound of what waits in memory (None: the default), room that is made in the end.
CASES = (
    ("memory suffices", None, 63 * MIB),
    ("memory of 256 KiB", MIB // 4, 63 * MIB),
    ("little room again", None, MIB // 2),
)


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[None]:
    """A file system of this size at a path; OSError where that is not permitted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or "mount failed")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def fill_disk(
    case: str, folder: Path, full_s: float, memory_bytes: int | None, room_bytes: int
) -> Row:
    """Log while the journal's disk is full, make room, and count what is there.

    Args:
        case: Name of the row.
        folder: Where the run goes; the small disk is mounted in it.
        full_s: How long the disk stays full.
        memory_bytes: Bound of what may wait in memory; the default one where None.
        room_bytes: What becomes free in the end.
    """
    disk, storage = folder / "disk", folder / "store"
    with (
        small_disk(disk, START_BYTES + room_bytes),
        environment(**{settings.JOURNAL_DIR: str(disk), settings.EXIT_TIMEOUT: "60"}),
    ):
        (disk / "ballast").write_bytes(bytes(room_bytes))
        session = quark.start_run(project="bench", storage_dir=storage, backends="csv:mirror")
        stream = session.open_run.stream
        if memory_bytes is not None:
            stream._log._capacity_bytes = memory_bytes
            stream._memory._capacity_bytes = memory_bytes
        metrics = quark.MetricsLogger(session)
        rows = exceptions = 0
        peak_bytes = 0
        chance = random.Random(0)

        def log_while(condition: Callable[[], bool], at_most_s: float) -> float:
            nonlocal rows, exceptions, peak_bytes
            began = time.monotonic()
            while condition() and time.monotonic() - began < at_most_s:
                for _ in range(5):
                    values = {name: chance.random() for name in ROW_METRICS}
                    try:
                        metrics.log_many(values, step=rows)
                    except Exception:
                        exceptions += 1
                    rows += 1
                peak_bytes = max(peak_bytes, stream._log._unwritten_bytes)
                time.sleep(0.002)
            return time.monotonic() - began

        def is_full() -> bool:
            return stream._log.journal_error is not None

        filled_s = log_while(lambda: not is_full(), 60.0)
        log_while(lambda: True, full_s)
        was_full = is_full()
        (disk / "ballast").unlink()
        again_s = log_while(is_full, WRITTEN_AGAIN_S)
        written_again = not is_full()
        log_while(lambda: True, 1.0)
        session.end_run()
        lanes = session.report_delivery().lanes
    run_id = str(session.run_id)
    store, mirror = read_store(storage, run_id), read_csv(storage / "mirror", run_id)
    events = quark.EventLogger(quark.open_run(run_id, storage)).read(event_type="records_dropped")
    logged = rows * len(ROW_METRICS)
    return {
        "case": case,
        "logged": logged,
        "exceptions": exceptions,
        "filled after s": filled_s,
        "full for s": full_s if was_full else 0.0,
        "written again after s": again_s if written_again else "never",
        "most in memory KiB": peak_bytes // 1024,
        "stored": len(store),
        "missing": logged - len(store),
        "told as gaps": sum(event.payload["records"].get("metric", 0) for event in events),
        "dropped in report": max(lane.dropped for lane in lanes),
        "waiting": sum(lane.waiting for lane in lanes),
        "duplicated": count_extra(store) + count_extra(mirror),
        "CSV differs": len(store.keys() ^ mirror.keys()),
    }


def measure_full_disk(*, quick: bool) -> list[Row]:
    full_s = 1.0 if quick else 20.0
    rows = []
    for case, memory_bytes, room_bytes in CASES[:2] if quick else CASES:
        folder = Path(tempfile.mkdtemp())
        try:
            rows.append(fill_disk(case, folder, full_s, memory_bytes, room_bytes))
        except OSError as error:
            print(f"\ndisk-full: skipped, no small file system can be mounted here ({error})")
            return []
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print_rows("Disk full under the journal, then room again", rows)
    return rows
