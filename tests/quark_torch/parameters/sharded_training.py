"""Run under torchrun: trains a small model with DDP or FSDP2 and writes down what was found."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import quark
from quark import ParameterDiagnostics


def take_part(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def train(kind, folder):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    found = []
    with (
        quark.start_run(project="p", storage_dir=folder) as session,
        ParameterDiagnostics(session, model, optimizer) as diagnostics,
    ):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            before = [take_part(p).clone() for p in model.parameters()]
            optimizer.step()
            records, _ = diagnostics.snapshot(step)
            for record, parameter, old in zip(records, model.parameters(), before, strict=True):
                part = take_part(parameter)
                expected = {
                    "value_norm": part.double().norm().item(),
                    "gradient_norm": take_part(parameter.grad).double().norm().item(),
                    "update_norm": (part.double() - old.double()).norm().item(),
                    "element_count": part.numel(),
                    "global_shape": list(parameter.shape),
                }
                found.append((record.to_dict(), expected))
        stored = len(diagnostics.read_summaries())
    path = Path(folder, f"{kind}{rank}.json")
    path.write_text(json.dumps({"snapshots": found, "stored": stored}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for chosen in ("ddp", "fsdp"):
        train(chosen, sys.argv[1])
    dist.destroy_process_group()
