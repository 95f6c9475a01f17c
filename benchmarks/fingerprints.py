"""What fingerprints cost: a file at each level, an output with its sketch, a watched loader.

    python benchmarks/fingerprints.py [--quick] [--json FILE]

Medians of several turns, one after the other, in one process; the file is in the page cache. The
watched loader is compared with itself unwatched, in turns; each batch has 64 images of 3x64x64
floats (48 kB each), so that samples are looked at in places, and 64 rows of 128 floats, whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from figures import make_parser, parse, write

import quark
from quark.provenance.fingerprints import fingerprint_path, sketch_output

MIB = 1024 * 1024


def measure_ms(work: Callable[[], object], turns: int) -> float:
    """Median of a call, in ms."""
    work()
    found = []
    for _ in range(turns):
        begun = time.perf_counter()
        work()
        found.append((time.perf_counter() - begun) * 1000)
    return statistics.median(found)


def measure_files(root: Path, size_mib: int, turns: int) -> dict[str, float]:
    """A file at each level."""
    path = root / "large.bin"
    with path.open("wb") as file:
        for _ in range(size_mib):
            file.write(os.urandom(MIB))

    def rest() -> None:
        """No run waits for it here."""

    return {
        f"file of {size_mib} MiB, {level}": measure_ms(
            lambda level=level: fingerprint_path(path, level, rest),  # type: ignore[misc]
            turns,
        )
        for level in ("sample", "full")
    }


def measure_outputs(turns: int) -> dict[str, float]:
    """An output with its sketch, and the digest of a pickle."""
    values = np.random.default_rng(0).normal(size=(64, 1000))
    large = np.zeros((64 * MIB,), dtype=np.float32)
    return {
        "64 x 1,000 doubles, digest and sketch": measure_ms(lambda: sketch_output(values), turns),
        "64 x 1,000 doubles, SHA-256 of the pickle": measure_ms(
            lambda: hashlib.sha256(pickle.dumps(values)).digest(), turns
        ),
        "256 MiB of float32, sample": measure_ms(
            lambda: sketch_output(large, level="sample"), turns
        ),
        "256 MiB of float32, full": measure_ms(lambda: sketch_output(large), max(1, turns // 10)),
    }


def measure_loader(root: Path, batches: int, turns: int) -> dict[str, float]:
    """What watching adds to a batch."""
    found: dict[str, float] = {}
    generator = np.random.default_rng(0)
    kinds: dict[str, Any] = {
        "64 images of 3x64x64, in places": generator.random((64, 3, 64, 64), dtype=np.float32),
        "64 rows of 128, whole": generator.random((64, 128), dtype=np.float32),
        "64 rows of 1,000, whole": generator.random((64, 1000), dtype=np.float32),
    }
    for name, batch in kinds.items():
        loader = [batch] * batches
        with quark.start_run(project="p", storage_dir=root) as session:

            def go(source: Any) -> None:
                for _ in source:
                    pass

            plain_ms = measure_ms(lambda: go(loader), turns)  # noqa: B023
            watched = session.watch_data(loader)
            watched_ms = measure_ms(lambda: go(watched), turns)  # noqa: B023
        found[f"watching, for each batch: {name}"] = (watched_ms - plain_ms) / batches
    return found


def main() -> None:
    """Measure and print."""
    arguments = parse(make_parser(__doc__, quick="fewer files and turns"))
    turns = 5 if arguments.quick else 30
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found = {
            **measure_files(root, 16 if arguments.quick else 256, turns),
            **measure_outputs(turns),
            **measure_loader(root, 64 if arguments.quick else 256, turns),
        }
    for name, figure_ms in found.items():
        print(f"{figure_ms:10.3f} ms  {name}")
    write(arguments, found)


if __name__ == "__main__":
    main()
