"""What artifacts cost: one of 2 GB, and ten thousand small ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import print_rows

import quark

LARGE_BYTES = 2 * 10**9
PROGRAM = """
import json, re, sys, time
import quark
folder, source, target = sys.argv[1:]
def peak_mb():
    # What getrusage says includes the process that this one was forked from.
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000
with (
    quark.start_run(project="large", storage_dir=folder) as session,
    quark.ArtifactStore(session) as store,
):
    before = peak_mb()
    begin = time.perf_counter()
    record = store.store_file("checkpoint", "model", source)
    stored_s = time.perf_counter() - begin
    begin = time.perf_counter()
    store.load_file(record, target)
    loaded_s = time.perf_counter() - begin
    print(json.dumps({
        "bytes": record.size_bytes, "sha256": record.sha256, "store s": stored_s,
        "load s": loaded_s, "peak MB before": before, "peak MB": peak_mb(), "goal MB": 200,
    }))
"""


def measure_large(*, quick: bool) -> list[dict[str, Any]]:
    """A file stored and loaded in a process of its own, whose peak memory is looked at."""
    size = LARGE_BYTES // 40 if quick else LARGE_BYTES
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name, "source"), Path(name, "target")
        block = os.urandom(1024 * 1024)
        with source.open("wb") as file:
            for number in range(size // len(block)):
                file.write(number.to_bytes(8, "little") + block[8:])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(Path(name, "store")), source, target],
            capture_output=True,
            text=True,
            check=True,
        )
        row = json.loads(done.stdout)
        row["equal"] = _digest(source) == _digest(target) == row.pop("sha256")
    print_rows("One large artifact", [row])
    return [row]


def _digest(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure_many(*, quick: bool) -> list[dict[str, Any]]:
    """Small artifacts, each another, beside writing as many files and syncing each."""
    count = 300 if quick else 10_000
    with tempfile.TemporaryDirectory() as name:
        floor_us = _write_files(Path(name, "floor"), min(count, 1000)) * 1e6
        with (
            quark.start_run(project="many", storage_dir=name) as session,
            quark.ArtifactStore(session) as store,
        ):
            begin = time.perf_counter()
            for number in range(count):
                store.store(
                    "tensor_summary", f"layers/{number % 100}", {"mean": number}, step=number
                )
            stored_s = time.perf_counter() - begin
            begin = time.perf_counter()
            for number in range(count):
                store.store(
                    "tensor_summary", f"again/{number % 100}", {"mean": number}, step=number
                )
            again_s = time.perf_counter() - begin
            begin = time.perf_counter()
            records = store.read()
            listed_s = time.perf_counter() - begin
            begin = time.perf_counter()
            right = sum(store.load(record) == {"mean": record.step} for record in records)
            loaded_s = time.perf_counter() - begin
    row = {
        "artifacts": count,
        "store us each": stored_s / count * 1e6,
        "file with fsync us": floor_us,
        "equal payload us each": again_s / count * 1e6,
        "list us each": listed_s / len(records) * 1e6,
        "load us each": loaded_s / len(records) * 1e6,
        "listed": len(records),
        "loaded right": right,
    }
    print_rows("Many small artifacts", [row])
    return [row]


def _store_one(store: quark.ArtifactStore, namespace: str, number: int) -> None:
    name = f"{namespace}/{number % 100}"
    store.store("tensor_summary", name, {"mean": number}, step=number)


def _write_files(folder: Path, count: int) -> float:
    """Seconds for a small file that is synced and renamed."""
    folder.mkdir()
    begin = time.perf_counter()
    for number in range(count):
        descriptor = os.open(folder / "part", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b'{"mean": %d}' % number)
        os.fsync(descriptor)
        os.close(descriptor)
        os.replace(folder / "part", folder / str(number))
    return (time.perf_counter() - begin) / count
