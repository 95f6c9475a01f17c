"""A training of several ranks in a sweep, under torchrun: `sweep_ranks.py ROOT NAME STOP LOGS`.

The ranks meet in a collective at each step, as a real training's do: one that left a trial alone
would leave the others waiting there.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed

import quark
from quark.sweeps import rank_agreement


def main(root, name, stop, logs):
    if logs == "zero":
        rank_agreement._GATHER_S = 1.0
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = torch.distributed.get_rank()
    sweep = quark.sweep(
        name, project="digits", space={"lr": quark.uniform(0.0, 1.0)}, metric="val/acc",
        mode="max", search="asha", budget=9, trials=5, seed=3, stop=stop == "stop",
        storage_dir=root,
    )  # fmt: skip
    for trial in sweep:
        step = -1
        with trial.start_run() as session:
            metrics = quark.MetricsLogger(session)
            for step in range(9):
                together = torch.tensor([float(step)])
                torch.distributed.all_reduce(together)
                assert together.item() == step * torch.distributed.get_world_size()
                if logs == "all" or rank == 0:
                    metrics.log("val/acc", trial["lr"], step=step)
                if trial.should_stop():
                    break
        said = {"rank": rank, "trial": trial.number, "token": trial.claim.token, "step": step,
                "lr": trial["lr"], "run": session.run_id, "restart": 0}  # fmt: skip
        print(json.dumps(said))
        sys.stdout.flush()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("QUARK_QUIET", "1")
    main(*sys.argv[1:])
