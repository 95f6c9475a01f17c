"""A worker of a sweep in a process of its own: `trial_worker.py STORAGE SECONDS`.

Each trial takes so long. It says on a line which trial it has begun.
"""

import sys
import time
from pathlib import Path

import quark


def main():
    storage_dir, seconds = Path(sys.argv[1]), float(sys.argv[2])
    sweep = quark.sweep("search", project="vision", storage_dir=storage_dir)
    for trial in sweep:
        with trial.start_run(storage_dir=storage_dir) as session:
            print(trial.number, session.run_id, flush=True)
            metrics = quark.MetricsLogger(session)
            for step in range(3):
                time.sleep(seconds / 3)
                metrics.log("loss", trial["lr"] + step, step=step)


if __name__ == "__main__":
    main()
