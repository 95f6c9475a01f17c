"""The CSV mirror, as a tracker asks for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quark_core.api import BackendConfig, MirrorBackend, MirrorRun, RunRecord


class CSVBackend(MirrorBackend):
    """CSV mirror as a tracker backend: metrics.csv, config.json and a file per table.

    Has the logging methods of `Tracker`.

    Args:
        outdir: Folder of the files and of Quark's own store.
        rank: Rank of this process. Inactive if it is not 0. Defaults to 0.
    """

    def __init__(self, outdir: str | os.PathLike[str], rank: int = 0) -> None:
        folder = Path(outdir).expanduser().absolute()
        super().__init__("csv", f"csv:?publish={quote(str(folder))}")
        self.storage_dir = folder
        self.active = rank == 0


def make_backend(outdir: str | os.PathLike[str] | None = None, **_: Any) -> CSVBackend:
    """The mirror that publishes into a folder, by default into the working directory."""
    return CSVBackend(outdir or Path.cwd())


def describe_run(config: BackendConfig, run: RunRecord) -> MirrorRun:
    """See `BackendDefinition.describe_run`."""
    folder = None if config.location or config.run_path is None else config.run_path / "csv"
    return MirrorRun("csv", run.id, run.name, config.project, directory=folder)
