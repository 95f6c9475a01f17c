"""Ten thousand runs in lists, ten thousand journals to sync, one of gigabytes: row 20."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from durability.points import environment
from storage.stores import make_losses, make_metric_batches

from quark_core.records.query import Query
from serving.journals import leave_journal
from serving.servers import Service, open_services
from serving.tally import Tally
from serving.work import make_start, open_backend

_ROOT = Path(__file__).resolve().parents[2]


def list_many_runs(*, quick: bool) -> list[Tally]:
    """Many runs are made, then listed page by page."""
    count = 200 if quick else 10_000
    tallies = []
    for opened in open_services():
        with opened as service, tempfile.TemporaryDirectory() as folder:
            with environment(**service.environment, QUARK_STORE_NAME="crowd"):
                backend: Any = open_backend(Path(folder), "run0")
                for index in range(count):
                    backend.write(make_start(f"run{index}", store="crowd"))
                before = psutil.Process(service.pid).memory_info().rss
                begin = time.perf_counter()
                page = backend.list_runs(limit=100)
                page_s = time.perf_counter() - begin
                found = {stored.run.id for stored in backend.list_runs()}
                listed_s = time.perf_counter() - begin - page_s
                grown = psutil.Process(service.pid).memory_info().rss - before
                backend.close()
            assert len(page) == min(100, count)
        tallies.append(
            Tally(
                row=20,
                fault=f"{count:,} runs listed, {service.name}",
                times=1,
                batches=count,
                acknowledged=count,
                points=count,
                lost=count - len(found),
                doubled=0,
                note=f"100 in {1e3 * page_s:.0f} ms, all in {listed_s:.1f} s, "
                f"server grew by {grown / 1e6:.0f} MB",
            )
        )
    return tallies


def sync_many_journals(*, quick: bool) -> list[Tally]:
    """Journals that killed processes left are delivered by `quark sync`, within bounded memory."""
    return [
        _sync(50 if quick else 2_000, 1, "journals of killed processes"),
        _sync(1, 200 if quick else 40_000, "one journal of many batches"),
    ]


def _sync(journals: int, batches: int, what: str) -> Tally:
    with Service("SQLite") as service, tempfile.TemporaryDirectory() as folder:
        with environment(**service.environment):
            size = _leave_journals(Path(folder), journals, batches)
            begin = time.perf_counter()
            output, peak = _run_sync(folder)
            taken_s = time.perf_counter() - begin
            if output:
                print(output)
            backend: Any = open_backend(Path(folder), "journal0")
            rows = sum(
                backend.read(f"journal{index}", "metric", Query()).count
                if journals > 1
                else sum(
                    p.count for p in backend.iterate("journal0", "metric", Query(), rows=10**5)
                )
                for index in range(journals)
            )
            backend.close()
        expected = journals * batches * 1000
        return Tally(
            row=20,
            fault=f"{journals:,} {what}" if journals > 1 else what,
            times=journals,
            batches=journals * (batches + 1),
            acknowledged=journals * (batches + 1),
            points=expected,
            lost=max(0, expected - rows),
            doubled=max(0, rows - expected),
            note=f"{size / 1e6:.0f} MB in {taken_s:.0f} s, peak {peak:.0f} MB",
        )


def _run_sync(folder: str) -> tuple[str, float]:
    """Run `quark sync`; what it said if it failed, and its peak of memory in MB.

    Asked of the process itself: what the system counts of a child that has
    ended begins with the memory of the process that it was forked from.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "quark", "sync", folder],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
        peak = 0.0
        while process.poll() is None:
            with suppress(OSError, IndexError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) / 1024)
            time.sleep(0.02)
        said.seek(0)
        return (said.read()[-2000:] if process.returncode else ""), peak


def _leave_journals(folder: Path, journals: int, batches: int) -> int:
    """Write journals as a process that was killed leaves them; returns their size."""
    values = make_losses(batches * 50, 20)
    parts = list(make_metric_batches(values))
    return sum(leave_journal(folder, f"journal{index}", parts) for index in range(journals))
