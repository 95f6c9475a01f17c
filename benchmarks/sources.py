"""What it costs to keep a project's sources: 300 files that the store lacks, and knows.

Run it by `python -m benchmarks.sources [--files 300] [--repeats 5]`. Figures are of the background
thread's processor time, beside that of one plain read and hash of the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from quark.provenance.source_snapshots import SourceKeeper, find_root
from quark_core.artifacts.payload_folder import PayloadFolder, PutPayload
from quark_core.records.json_object import JsonObject

_LINES = 160
_OLD_S = 3600


class _Place:
    def __init__(self, root: Path, number: int) -> None:
        self.storage_dir = root
        self.directory: Path | None = root / ".quark" / "runs" / str(number)

    def find_payloads(self) -> PayloadFolder:
        assert self.directory is not None
        return PayloadFolder(self.directory)

    def emit_payload(self, key: str, payload_format: str, put: PutPayload) -> None:
        """Records cost what records cost."""

    def emit_fingerprint(
        self, subject: str, key: str, digest: str, level: str, metadata: JsonObject
    ) -> None:
        """Likewise."""


def make_project(folder: Path, files: int) -> None:
    """A package of modules with random numbers in them, imported here."""
    import os

    package = folder / "benched"
    package.mkdir()
    (folder / "pyproject.toml").touch()
    rng = random.Random(0)
    for number in range(files):
        lines = (f"value_{i} = {rng.random()!r}  # of module {number}" for i in range(_LINES))
        path = package / ("__init__.py" if number == 0 else f"m{number}.py")
        path.write_text("\n".join(lines) + "\n")
        then = time.time() - _OLD_S
        os.utime(path, (then, then))
    sys.path.insert(0, str(folder))
    for number in range(files):
        importlib.import_module("benched" if number == 0 else f"benched.m{number}")


def measure(folder: Path, store: Path, number: int) -> float:
    """Processor time of one look, in ms."""
    sys.modules["__main__"].__dict__["__file__"] = str(folder / "benched" / "__init__.py")
    begun = time.thread_time()
    keeper = SourceKeeper(_Place(store, number), find_root(str(folder)), "keep")
    keeper.look()
    return (time.thread_time() - begun) * 1000


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, store = Path(place, "project"), Path(place, "store")
        folder.mkdir()
        make_project(folder, arguments.files)
        paths = sorted((folder / "benched").glob("*.py"))
        begun = time.thread_time()
        size = sum(len(data) for path in paths if hashlib.sha256(data := path.read_bytes()))
        plain = (time.thread_time() - begun) * 1000
        new = measure(folder, store, 0)
        known = [measure(folder, store, 1 + i) for i in range(arguments.repeats)]
        print(f"{len(paths)} files, {size / 1e6:.2f} MB, {len(sys.modules)} modules")
        print(f"read and hash alone        {plain:8.1f} ms")
        print(f"new to the store           {new:8.1f} ms  ({new / plain:.1f} times)")
        middle = statistics.median(known)
        print(f"known to the store, median {middle:8.1f} ms  ({middle / plain:.2f} times)")
        print(f"known to the store, worst  {max(known):8.1f} ms")


if __name__ == "__main__":
    main()
