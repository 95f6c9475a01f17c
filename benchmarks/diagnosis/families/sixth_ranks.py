"""Trainings on two ranks, started by torchrun from within a scenario; this file is the script."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import two_ranks

STEPS = 100
_SENDS_EVERY = 10


train_ranks = partial(two_ranks.train_ranks, __name__)
"""Trains digits on two ranks.

`apart`: nothing is ever averaged; `local`: weights are, every tenth step.
"""


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
