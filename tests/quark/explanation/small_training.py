"""A real small training in three files, run in processes of its own, and ways to change it."""

import os
import subprocess
import sys
from pathlib import Path

from wide_bounds import keep_sources_in_children

TRAIN = """\
import argparse

import numpy as np

import quark
from data import load
from model import Net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="data.npz")
    parser.add_argument("--store", required=True)
    args = parser.parse_args()
    config = {name: value for name, value in vars(args).items() if name not in ("store", "data")}
    session = quark.start_run(
        project="small", storage_dir=args.store, config=config, group="paper/fig1"
    )
    x, y = load(args.data)
    session.fingerprint_data("train", {"x": x, "y": y}, level="full")
    net = Net(args.width, np.random.default_rng(args.seed))
    order = np.random.default_rng(args.seed + 1)
    metrics = quark.MetricsLogger(session)
    for step in range(60):
        batch = order.permutation(len(x))[:64]
        loss = net.step(x[batch], y[batch], args.lr)
        metrics.log("train/loss", loss, step=step)
        metrics.log("val/loss", net.loss(x, y), step=step)
    session.end_run()
    print(session.run_id)


main()
"""
MODEL = '''\
import numpy as np


def squash(values):
    """Keep it small."""
    return np.tanh(values)


def scale_rate(rate):
    return clip(rate) * 1.0


def clip(rate):
    return min(rate, 10.0)


class Net:
    def __init__(self, width, rng):
        self.first = rng.normal(0, 0.5, (4, width))
        self.last = rng.normal(0, 0.5, width)

    def predict(self, x):
        return squash(x @ self.first) @ self.last

    def loss(self, x, y):
        return float(((self.predict(x) - y) ** 2).mean())

    def step(self, x, y, rate):
        hidden = squash(x @ self.first)
        error = 2 * (hidden @ self.last - y) / len(x)
        last = hidden.T @ error
        first = x.T @ (np.outer(error, self.last) * (1 - hidden**2))
        loss = self.loss(x, y)
        rate = scale_rate(rate)
        self.last -= rate * last
        self.first -= rate * first
        return loss
'''
DATA = """\
import numpy as np


def load(path):
    found = np.load(path)
    return normalise(found["x"]), found["y"]


def normalise(x):
    return x / 1.0
"""
MAKE = """\
import numpy as np

rng = np.random.default_rng(7)
x = rng.normal(size=(400, 4))
np.savez("data.npz", x=x, y=np.tanh(x @ [1.0, -2.0, 0.5, 0.0]) + 0.05 * rng.normal(size=400))
"""


class Training:
    """The folder of a training, and the store of its runs."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "project"
        self.store = root / "store"
        self.folder.mkdir(parents=True)
        (self.folder / "pyproject.toml").write_text('[project]\nname = "small"\n')
        for name, text in (("train.py", TRAIN), ("model.py", MODEL), ("data.py", DATA)):
            (self.folder / name).write_text(text)
        subprocess.run([sys.executable, "-c", MAKE], cwd=self.folder, check=True)

    def change(self, name: str, before: str, after: str) -> None:
        """Change a file, which must have the text that is replaced."""
        path = self.folder / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    def run(self, *arguments: str, **variables: str) -> str:
        """One run, in a process of its own; its id."""
        done = subprocess.run(
            [sys.executable, "train.py", "--store", str(self.store), *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                **keep_sources_in_children(),
                "QUARK_QUIET": "1",
                **variables,
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]
