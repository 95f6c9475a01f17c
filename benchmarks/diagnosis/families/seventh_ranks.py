"""Trainings on two ranks under DistributedDataParallel; this file is the script of each."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import two_ranks

STEPS = 90


train_ranks = partial(two_ranks.train_ranks, __name__)
"""Trains digits on two ranks.

`bare`: the wrapped module is called past its wrapper; `slow`: rank 1
reads slowly; `sound`: neither.
"""


def _train(folder: Path, seed: int, kind: str, every: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    import quark
    from benchmarks.diagnosis.datasets import load_digits

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = load_digits(np.random.default_rng(seed), noise=0.1)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
    )
    # Each rank has its own files, and files were written class by class.
    own = data.y.argsort(stable=True).tensor_split(ranks)[rank]
    if kind != "bare":
        own = torch.arange(rank, len(data.y), ranks)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    order = np.random.default_rng(seed + 1000 + rank)
    schedule = quark.HookScheduleConfig(every_n_steps=every)
    kept = quark.ParameterDiagnosticsConfig(schedule=schedule)
    quiet = quark.SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)
    reading_s = 0.03 if kind == "slow" and rank else 0.001
    read_ms: list[float] = []

    def prove() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(functional.cross_entropy(model(data.proof_x), data.proof_y))
        model.train()
        return loss

    first = prove()
    with (
        quark.start_run(project="diagnosis", storage_dir=folder, ranks="all") as session,
        quark.MetricsLogger(session) as metrics,
        quark.SystemTelemetry(session, config=quiet) as telemetry,
        quark.ParameterDiagnostics(session, model, optimizer, config=kept) as diagnostics,
    ):
        for step in range(STEPS):
            scope = telemetry.start_step(step) if kind == "slow" else None
            begun = time.perf_counter()
            rows = own[torch.from_numpy(order.integers(0, len(own), 32))]
            if kind == "slow":
                time.sleep(reading_s)
            read_ms.append(1e3 * (time.perf_counter() - begun))
            if scope is not None:
                scope.mark_data_ready()
            optimizer.zero_grad()
            output = (model if kind == "bare" else wrapped)(data.x[rows])
            loss = functional.cross_entropy(output, data.y[rows])
            loss.backward()
            optimizer.step()
            if scope is not None:
                scope.finish()
            diagnostics.snapshot(step)
            metrics.log("train/loss", loss.item(), step=step)
            if (step + 1) % 15 == 0:
                model.eval()
                with torch.no_grad():
                    held = functional.cross_entropy(model(data.val_x), data.val_y)
                model.train()
                metrics.log("val/loss", float(held), step=step)
        run_id = session.run_id
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    both = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(both, flat)
    times = [torch.zeros(1) for _ in range(ranks)]
    dist.all_gather(times, torch.tensor([float(np.median(read_ms))]))
    apart = float((both[0] - both[1]).norm() / both[0].norm())
    if rank == 0:
        made = {"run_id": run_id, "apart": apart, "first": first, "end": prove()}
        made.update(quick=float(times[0]), slow=float(times[1]))
        (folder / "ranks.json").write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
