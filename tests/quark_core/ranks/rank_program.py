"""What each rank of a launch runs in these tests: `rank_program.py STORAGE [KEY=VALUE ...]`.

ranks, backends    arguments of start_run
runs               how many runs, one after the other
steps              steps of each
dies=RANK          this rank kills itself in the first attempt, half way
when=ended         and not before the leading rank has ended the run
falls=RANK         this rank ends with an error in the first attempt, half way
gloo=1             the ranks are a process group, and all_reduce at every step
sleep_ms           time of a step
late=RANK          this rank comes to start_run when the leading rank has ended the run
together=COUNT     no process ends its run before so many have begun theirs
checkpoint=HOW     rank 0 writes one at step 7, from which a restart goes on, by start_run alone
                   (plain), by start_run(state=...) (start) or by resume_run (resume)
"""

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

storage_dir = sys.argv[1]
given = dict(argument.split("=", 1) for argument in sys.argv[2:])
steps = int(given.get("steps", 20))
restart = int(
    os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0
)


def wait_for_end():
    """Until the leader's claim says that it has ended the run."""
    deadline = time.monotonic() + 200
    claims = Path(storage_dir, ".quark", "launches")
    while not any(json.loads(path.read_text())["ended"] for path in claims.glob("*.json")):
        assert time.monotonic() < deadline, "the run was not ended"
        time.sleep(0.02)


def wait_for_others(count):
    deadline = time.monotonic() + 200
    begun = Path(storage_dir, "begun")
    begun.mkdir(exist_ok=True)
    (begun / str(os.getpid())).touch()
    while len(list(begun.iterdir())) < count:
        assert time.monotonic() < deadline, "the others have not begun"
        time.sleep(0.02)


def load_checkpoint():
    path = Path(storage_dir, "checkpoint.json")
    return json.loads(path.read_text()) if path.exists() else None


def save_checkpoint(session, step):
    scratch = Path(storage_dir, "checkpoint.new")
    scratch.write_text(json.dumps(session.state_dict(step=step)))
    scratch.replace(scratch.with_name("checkpoint.json"))


def begin_run(quark):
    arguments = {name: given.get(name) for name in ("ranks", "backends")}
    arguments["storage_dir"] = storage_dir
    if checkpoint is not None and given["checkpoint"] == "resume":
        return quark.resume_run(run_id=checkpoint["run_id"], state=checkpoint, **arguments)
    if given.get("checkpoint") == "start":
        arguments["state"] = checkpoint
    return quark.start_run(project="ranks", **arguments)


checkpoint = load_checkpoint() if "checkpoint" in given else None
first_step = 0 if checkpoint is None else checkpoint["step"] + 1


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import quark
    from quark_core.ranks.launches import detect_rank

    if given.get("gloo"):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    rank = detect_rank().rank
    if given.get("late") == str(rank):
        wait_for_end()
    for _ in range(int(given.get("runs", 1))):
        begin = time.monotonic()
        session = begin_run(quark)
        took_s = time.monotonic() - begin
        with session, quark.MetricsLogger(session) as metrics:
            attempt = session.context.run.attempt
            for step in range(first_step, steps):
                metrics.log("loss", rank + step / 100 + restart, step=step)
                if step == 7 and rank == 0 and "checkpoint" in given:
                    save_checkpoint(session, step)
                if step == steps // 2 and restart == 0:
                    if given.get("dies") == str(rank):
                        if given.get("when") == "ended":
                            wait_for_end()
                        os.kill(os.getpid(), signal.SIGKILL)
                    if given.get("falls") == str(rank):
                        raise SystemExit(3)
                time.sleep(float(given.get("sleep_ms", 0)) / 1000)
                if given.get("gloo"):
                    dist.all_reduce(torch.ones(1))
            if given.get("together"):
                wait_for_others(int(given["together"]))
        report = session.report_delivery()
        found = {
            "rank": rank,
            "restart": restart,
            "run_id": session.run_id,
            "attempt": attempt,
            "took_s": took_s,
            "status": session.status,
            "complete": report.complete,
            "lanes": [lane.backend for lane in report.lanes],
            "warnings": [str(one.message) for one in caught if "run_id" in str(one.message)],
        }
        # One write each, so that lines of several ranks do not mix.
        os.write(1, f"{json.dumps(found)}\n".encode())
    if given.get("gloo"):
        dist.barrier()
        dist.destroy_process_group()
