"""Train on several processes with DistributedDataParallel, and look inside from rank 0.

    torchrun --nproc_per_node 2 examples/train_ddp.py [--steps 40] [--storage-dir DIR]

Every rank calls the same code; only rank 0 writes, the others' calls cost
nothing. Needs the extra "torch".
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quark


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on several processes.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--storage-dir", type=Path, default=Path())
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Other ranks do not know the run's id unless QUARK_RUN_ID is set; here they need not.
    warnings.filterwarnings("ignore", message="run_id is unknown on rank")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with quark.start_run(
        project="ddp-demo",
        config={"world_size": dist.get_world_size(), "lr": 0.1},
        storage_dir=arguments.storage_dir,
    ) as session:
        metrics = quark.MetricsLogger(session)
        with quark.watch(session, model, optimizer, every_n_steps=10) as watch:
            for step in range(arguments.steps):
                watch.step(step)
                inputs = torch.randn(32, 32, generator=generator)
                loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                metrics.log("train/loss", loss.item(), step=step)
        if rank == 0 and watch.hooks is not None and watch.parameters is not None:
            layers = {record.module_name for record in watch.hooks.read()}
            print(f"{os.environ.get('WORLD_SIZE')} ranks, loss {loss.item():.3f}")
            print(f"layers: {', '.join(sorted(layers))}")
            print(f"run {session.run_id}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
