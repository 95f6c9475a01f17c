"""Log to CSV files, to Quark's own store and to a backend of one's own, all at once.

python examples/tracker_multiplexer.py [OUTDIR]

QUARK_TRACKER_BACKENDS names other backends, such as `wandb,csv`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import quark


class JsonLines(quark.TrackerBackend):
    """Writes a line per call; its calls come on a thread of their own."""

    name = "jsonl"

    def __init__(self, outdir: str | Path | None = None, **_others: Any) -> None:
        self._path = Path(outdir or ".", "rows.jsonl")
        self._lines: list[str] = []

    def log(self, metrics: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        self._lines.append(json.dumps({"step": step, "commit": commit, **metrics}))

    def log_config(self, config: dict[str, Any]) -> None:
        self._lines.append(json.dumps({"config": config}))

    def finish(self) -> None:
        self._path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        print(f"jsonl: {len(self._lines)} lines")


def main() -> None:
    outdir = Path(sys.argv[1] if len(sys.argv) > 1 else "tracked").resolve()
    quark.register_backend("jsonl", JsonLines)
    outdir.mkdir(parents=True, exist_ok=True)

    with quark.setup_tracker(
        project_name="tracker-demo",
        backends=os.environ.get("QUARK_TRACKER_BACKENDS", "csv,jsonl"),
        config={"lr": 3e-4, "steps": 50},
        outdir=outdir,
    ) as tracker:
        tracker.log_config({"model": "resnet18"})
        for step in range(50):
            # Both calls are one row: the first one waits for the second.
            tracker.log({"lr": 3e-4 * 0.99**step}, step=step, commit=False)
            tracker.log({"loss": math.exp(-step / 20), "ok": True}, step=step)
        tracker.log_table("confusion", ["class", "hits"], [["cat", 41], ["dog", 9]])
        tracker.log_artifacts({"code": __file__})
        run_id = tracker.run_id

    for path in sorted(outdir.iterdir()):
        if path.is_file():
            print(f"{path.name}: {len(path.read_text().splitlines())} lines")
    if run_id is not None:
        losses = quark.series(quark.open_run(run_id, outdir), "loss")
        print(f"quark: {len(losses.last)} losses of run {run_id}")


if __name__ == "__main__":
    main()
