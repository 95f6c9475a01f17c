"""One training with five backends, and every point of it in each; also with kills on the way."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mirroring.backends import list_backends
from mirroring.ledger import Ledger
from mirroring.readers import read_everywhere
from mirroring.tally import Tally, count
from quark_core.runs import recovery

_TIMEOUT_S = 600.0
_SYNC_TIMEOUT_S = 120.0


class Run:
    """One run of a training, over all of its processes.

    Args:
        folder: The storage root.
        steps: How long it trains.
        uri: MLflow's.
    """

    def __init__(self, folder: Path, steps: int, uri: str) -> None:
        self.folder = folder
        self.steps = steps
        self.uri = uri
        self.ledger = Ledger(folder / "ledger", steps)
        self.run_id: str | None = None
        self.unknown: dict[str, int] = {}
        list_backends(uri)  # so that what is left behind finds its way

    def start(self, pause_s: float = 0.0) -> subprocess.Popen[str]:
        """A process that trains on, from the start or after what was begun."""
        command = [sys.executable, "-m", "mirroring.training", str(self.folder), str(self.steps)]
        command += [self.uri, *([self.run_id] if self.run_id else [])]
        process = subprocess.Popen(
            [*command, "--pause-s", str(pause_s)],
            stdout=subprocess.PIPE,
            text=True,
            env=_make_environment(),
        )
        assert process.stdout is not None
        with process.stdout:
            run_id = process.stdout.readline().strip()
        if not run_id:
            raise RuntimeError(f"the training did not start ({process.wait(60)})")
        self.run_id = run_id
        return process

    def wait_for(self, steps: int, process: subprocess.Popen[str]) -> None:
        """Wait until a process has logged so many steps."""
        while self.ledger.done < steps and process.poll() is None:
            time.sleep(0.001)

    def kill(self, process: subprocess.Popen[str]) -> set[int]:
        """Kill a process; returns the steps that were in flight."""
        process.kill()
        process.wait()
        return set(range(self.ledger.done, self.ledger.begun))

    def finish(self, pause_s: float = 0.0) -> None:
        """Train to the end, and deliver what waits."""
        process = self.start(pause_s)
        status = process.wait(_TIMEOUT_S)
        if status:
            raise RuntimeError(f"the training ended with exit status {status}")
        deadline = time.monotonic() + _SYNC_TIMEOUT_S
        while True:
            lanes = recovery.sync(self.folder)
            for lane in lanes:
                name = lane.backend.partition("+")[0].partition(":")[0]
                self.unknown[name] = self.unknown.get(name, 0) + lane.unknown
            waiting = [lane for lane in lanes if lane.state != "delivered"]
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"these never came: {waiting}")
            time.sleep(0.5)

    def count(self, part: str, *, loose: set[int] | None = None, times: int = 0) -> list[Tally]:
        """What each backend has in the end."""
        assert self.run_id is not None
        found = read_everywhere(self.folder, self.run_id, self.uri)
        return count(
            part, self.ledger, found, loose=loose or set(), unknown=self.unknown, times=times
        )


def log_everywhere(uri: str, *, steps: int) -> list[Tally]:
    """One training without a fault."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), steps, uri)
        run.finish()
        return run.count("points")


def kill_training(uri: str, *, steps: int, kills: Sequence[float], pause_s: float) -> list[Tally]:
    """One training that is killed at each of these shares of its steps, and resumed."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), steps, uri)
        loose: set[int] = set()
        for share in kills:
            process = run.start(pause_s)
            run.wait_for(int(share * steps), process)
            # Anywhere in a call, and in what the lanes are at.
            time.sleep(random.random() * 0.7)
            loose |= run.kill(process)
        run.finish(pause_s)
        return run.count("kills", loose=loose, times=len(kills))


def _make_environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[1]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    paths = [str(root), str(root.parent), kept.get("PYTHONPATH", "")]
    with contextlib.suppress(KeyError):
        del kept["QUARK_BACKENDS"]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "QUARK_EXIT_TIMEOUT_SECONDS": "120",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
