"""A training with everything of provenance on, as a script of a project of its own."""

import os
import subprocess
import sys

import quark
from quark_core.records.query import Query

ENVIRONMENT = {
    "QUARK_CAPTURE": "sys",
    "QUARK_SOURCES": "keep",
    "QUARK_SYSTEM_METRICS": "0",
    "QUARK_QUIET": "1",
}

# What is called at which moment is in the arguments: steps, and what happens to it.
SCRIPT = '''
import os, signal, sys, threading, time
import numpy as np
import quark
import parts

class Dataset:
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return np.full(4, index, dtype=np.float32)

@quark.trace("train_step", output=True)
def train_step(batch, rate):
    return parts.scale(batch, rate)

def begin(storage_dir, **more):
    config = quark.tracked({"lr": 0.1, "unread": 1, "model": {"depth": 2}})
    session = quark.start_run(
        project="p", storage_dir=storage_dir, config=config, group=["paper/fig3", "idea"],
        version="v1", **more,
    )
    return session, config

def resume(storage_dir, run_id, **more):
    config = quark.tracked({"lr": 0.1, "unread": 1, "model": {"depth": 2}})
    return quark.resume_run(run_id=run_id, storage_dir=storage_dir, **more), config

def train(session, config, steps, first=0, sleep_s=0.0, on_step=None):
    """Logs m = step at each step, with all else on; tells the run and each step that is done."""
    metrics = quark.MetricsLogger(session)
    os.write(1, b"run %s\\n" % session.run_id.encode())
    session.annotate(gpu="V100", first=first)
    session.fingerprint_data("dataset", Dataset())
    session.fingerprint_data("folder", os.path.dirname(os.path.abspath(__file__)))
    loader = quark.watch_data([np.full((2, 4), step) for step in range(first, steps)], "train")
    for step, batch in enumerate(metrics.progress(loader, total=steps - first), first):
        with metrics.timer("step"):
            if on_step is not None:
                on_step(step)
            result = train_step(batch, config["lr"])
            metrics.aggregate("loss/batch", float(result.mean()), keep="stat", step=step)
            metrics.aggregate("loss/ring", float(step), keep="ring", step=step)
        if step & (step - 1) == 0:
            session.fingerprint("result", {"result": result, "step": step}, step=step)
            session.annotate(last=step)
        metrics.log("m", float(step), step=step)
        os.write(1, b"step %d\\n" % step)
        if sleep_s:
            time.sleep(sleep_s)
    return metrics

if __name__ == "__main__":
    storage_dir = sys.argv[1]
'''
PARTS = "def scale(batch, rate):\n    return batch * rate\n"


def write_project(folder, body):
    """A project of two files whose script does `body`; returns the script."""
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '1'\n")
    (folder / "parts.py").write_text(PARTS)
    script = folder / "train.py"
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    script.write_text(SCRIPT + lines)
    return script


def launch(script, storage_dir, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(script), str(storage_dir), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, **environment},
    )


def read_run_id(process):
    """The run's id, which the script prints before all else; what follows is read elsewhere."""
    return process.stdout.readline().split()[1]


def read_to_step(process, step):
    """What the script prints until a step is done."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == f"step {step}\n":
            return "".join(lines)
    raise AssertionError(f"it ended before step {step}: {process.stderr.read()}")


def list_done(told):
    """The steps whose `log` has returned, by what a script has printed."""
    return [float(line.split()[1]) for line in told.splitlines() if line.startswith("step ")]


def list_to_last(told):
    """The steps up to the last one whose `log` has returned, where lines in between may lack.

    What a pipe has given to `readline` ahead of its time is not in what `communicate` returns.
    """
    return list(map(float, range(int(max(list_done(told))) + 1)))


def read_records(run_id, storage_dir, kind):
    found = quark.open_run(run_id, storage_dir).open_run
    return found.reader.read(run_id, kind, Query(all_attempts=True)).to_records()


def count_warnings(errors):
    """How often each warning came, by its words without numbers."""
    said = {}
    for line in errors.splitlines():
        text = "".join(letter for letter in line if not letter.isdigit())
        said[text] = said.get(text, 0) + 1
    return said
