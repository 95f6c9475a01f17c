"""Starts the script of a training on two ranks, from within a scenario."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw


def train_ranks(script: str, recorder: Recorder, draw: Draw, kind: str) -> dict[str, Any]:
    """Train on two ranks into the recorder's folder; returns what was true of it.

    Args:
        script: The module that torchrun starts with the folder, the seed, the kind and
            the steps from probe to probe; it writes what is true into `ranks.json`.
        recorder, draw: Of the run.
        kind: A word that the script knows.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    task = [script, str(recorder.directory), str(draw.torch_seed), kind, str(recorder.every)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_LOG_LEVEL": "ERROR"}
    subprocess.run(
        [*launcher, "--nproc_per_node=2", "-m", *task], check=True, env=environ, timeout=120
    )
    made: dict[str, Any] = json.loads((recorder.directory / "ranks.json").read_text())
    recorder.run_id = made["run_id"]
    return made
