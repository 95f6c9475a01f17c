"""Run under torchrun: trains small models on two ranks, whose replicas stay the same or part."""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import quark
from quark import ParameterDiagnostics

STEPS = 12
PARTS_AT = 6


def build(kind, rank):
    torch.manual_seed(rank if kind == "seeds" else 0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        return model
    if kind == "seeds":
        return model  # its gradients are averaged by hand, and nobody has sent its weights
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=kind == "views")


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(kind, folder):
    rank = dist.get_rank()
    model = build(kind, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 if kind == "seeds" else 1 + rank)
    with (
        quark.start_run(project="p", storage_dir=folder, ranks="all") as session,
        ParameterDiagnostics(session, model, optimizer) as diagnostics,
    ):
        for step in range(STEPS):
            is_alone = kind == "no_sync" and step >= PARTS_AT
            with model.no_sync() if is_alone else contextlib.nullcontext():
                optimizer.zero_grad()
                model(torch.randn(5, 6)).square().mean().backward()
            if kind == "seeds":
                average(model)
            if kind == "edited" and step == PARTS_AT and rank == 1:
                with torch.no_grad():
                    model.module[2].bias.add_(1e-3)
            optimizer.step()
            diagnostics.snapshot(step)
        if rank == 0:
            Path(folder, f"{kind}.txt").write_text(session.run_id)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for chosen in sys.argv[2].split(","):
        train(chosen, sys.argv[1])
    dist.destroy_process_group()
