"""Trainings on two ranks, started by torchrun from within a scenario; this file is the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.diagnosis.recorder import Recorder
from benchmarks.diagnosis.scenario import Draw

STEPS = 100
_SENDS_EVERY = 10


def train_ranks(recorder: Recorder, draw: Draw, kind: str) -> dict[str, Any]:
    """Train digits on two ranks into the recorder's folder; returns what was true of it.

    Args:
        recorder, draw: Of the run.
        kind: `apart`: nothing is ever averaged; `local`: weights are, every tenth step.
    """
    told = recorder.directory / "ranks.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    task = [__name__, str(recorder.directory), str(draw.torch_seed), kind, str(recorder.every)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_LOG_LEVEL": "ERROR"}
    subprocess.run(
        [*launcher, "--nproc_per_node=2", "-m", *task], check=True, env=environ, timeout=120
    )
    made: dict[str, Any] = json.loads(told.read_text())
    recorder.run_id = made["run_id"]
    return made


def _train(folder: Path, seed: int, kind: str, every: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import quark
    from benchmarks.diagnosis.datasets import load_digits

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    data = load_digits(np.random.default_rng(seed), noise=0.1)
    torch.manual_seed(seed + (rank if kind == "apart" else 0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind == "apart" else 0)
    order = np.random.default_rng(seed + 1000 + rank)
    schedule = quark.HookScheduleConfig(every_n_steps=every)
    kept = quark.ParameterDiagnosticsConfig(schedule=schedule)

    def prove() -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(model(data.proof_x), data.proof_y))

    first = prove()
    with (
        quark.start_run(project="diagnosis", storage_dir=folder, ranks="all") as session,
        quark.MetricsLogger(session) as metrics,
        quark.ParameterDiagnostics(session, model, optimizer, config=kept) as diagnostics,
    ):
        for step in range(STEPS):
            rows = torch.from_numpy(order.integers(0, len(data.x), 32))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data.x[rows]), data.y[rows])
            loss.backward()
            optimizer.step()
            if kind == "local" and (step + 1) % _SENDS_EVERY == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        dist.all_reduce(parameter)
                        parameter /= dist.get_world_size()
            diagnostics.snapshot(step)
            metrics.log("train/loss", loss.item(), step=step)
            if (step + 1) % 20 == 0:
                with torch.no_grad():
                    held = functional.cross_entropy(model(data.val_x), data.val_y)
                metrics.log("val/loss", float(held), step=step)
        run_id = session.run_id
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    apart = float((both[0] - both[1]).norm() / both[0].norm())
    if rank == 0:
        made = {"run_id": run_id, "apart": apart, "first": first, "end": prove()}
        (folder / "ranks.json").write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
