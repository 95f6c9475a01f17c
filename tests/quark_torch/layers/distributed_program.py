"""What each process of a launch runs, for each kind of distribution; argument 1 is the folder."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import quark
from quark import HookEngine, HookEngineConfig, LayerFilterConfig

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    elif kind == "parallel":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"0": plan})
    return model


def run(kind, storage_dir):
    model = build(kind)
    filters = LayerFilterConfig(include_names=("0",) if kind == "tensor" else ())
    torch.manual_seed(1 if kind in ("tensor", "parallel") else rank)
    values = torch.randn(6, 8)
    seen = []
    first = model.module[0] if kind == "ddp" else model[0]
    first.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        quark.start_run(project="p", storage_dir=storage_dir) as session,
        HookEngine(session, model, optimizer, config=HookEngineConfig(filters=filters)) as hooks,
    ):
        for step in range(2):
            with hooks.step(step) as probed:
                output = (first if kind == "tensor" else model)(values)
                (output.to_local() if kind == "tensor" else output).sum().backward()
            assert probed
            optimizer.step()
            optimizer.zero_grad()
        records = [record.to_dict() for record in hooks.read()] if rank == 0 else []
    local = seen[0].to_local() if kind == "tensor" else seen[0]
    return {
        "records": records,
        "names": list(hooks.instrumented_module_names),
        "mean": local.double().mean().item(),
        "norm": local.double().norm().item(),
        "count": local.numel(),
    }


found = {}
for number, kind in enumerate(("ddp", "fsdp", "tensor", "parallel")):
    os.environ["QUARK_RUN_ID"] = f"{number:016x}"
    found[kind] = run(kind, folder / kind)
(folder / f"rank{rank}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
