"""A worker of a sweep as a process of its own: `sweep_worker.py ROOT NAME [seconds a step]`.

Prints a line of JSON for each trial that it begins and for each that it ends.
"""

import json
import os
import sys
import time

import quark

SPACE = {"lr": quark.uniform(0.0, 1.0)}


def main(root, name, step_s="0", **changes):
    arguments = {"metric": "val/acc", "mode": "max", "trials": 12, "seed": 2, **changes}
    sweep = quark.sweep(name, project="digits", space=SPACE, storage_dir=root, **arguments)
    for trial in sweep:
        say(begins=trial.number, token=trial.claim.token, lr=trial["lr"])
        with trial.start_run() as session:
            metrics = quark.MetricsLogger(session)
            say(trains=trial.number)
            for step in range(trial.budget or 4):
                time.sleep(float(step_s))
                metrics.log("val/acc", trial["lr"] * (step + 1), step=step)
                if trial.should_stop():
                    break
        say(ends=trial.number, token=trial.claim.token, step=step)
    say(over=True)


def say(**values):
    print(json.dumps({"pid": os.getpid(), "rank": int(os.environ.get("RANK", 0)), **values}))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4], **json.loads(os.environ.get("SWEEP_CHANGES", "{}")))
