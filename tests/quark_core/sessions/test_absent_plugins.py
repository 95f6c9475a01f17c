"""A program trains without the plugins of features."""

import subprocess
import sys
from argparse import ArgumentParser
from importlib.metadata import entry_points

import pytest

import quark
from quark_core import hookspecs
from quark_core.backends import registry

TRAINING = """
import sys
from importlib.abc import MetaPathFinder

ROOMS = ("analysis", "configuration", "notifications", "provenance", "sweeps")

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple(f"quark.{room}" for room in ROOMS)):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from argparse import ArgumentParser
import quark

parser = ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
with quark.start_run(project="p", config=parser, storage_dir=sys.argv.pop(1)) as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    session.config.update(lr=0.2)
    quark.EventLogger(session).log("alert_raised", payload={"title": "a", "message": "b"})
    assert session.trial is None
print(session.status, dict(session.config))
"""


@pytest.mark.parametrize("absent", ["analysis", "configuration", "notifications", "sweeps"])
def test_a_program_trains_without_the_plugin(absent, tmp_path, monkeypatch):
    groups = (hookspecs.ENTRY_POINT_GROUP, hookspecs.PLUGIN_GROUP)
    points = [each for group in groups for each in entry_points(group=group)]
    monkeypatch.setattr(
        registry,
        "_default",
        registry.BackendRegistry.discover([each for each in points if each.name != absent]),
    )
    monkeypatch.setenv("QUARK_NOTIFY", "webhook+https://localhost:1/x")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.5"])
    parser = ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    with quark.start_run(project="p", config=parser, storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
        session.config.update(epochs=3)
    assert session.trial is None
    with quark.open_run(session.run_id, storage_dir=tmp_path) as stored:
        assert (stored.status, stored.config) == ("completed", {"lr": 0.5, "epochs": 3})
        origins = {each.source for each in stored.open_run.config.origins}
    assert (origins == set()) == (absent == "configuration")


@pytest.mark.long
def test_a_program_trains_where_no_module_of_a_feature_can_be_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAINING, tmp_path, "--lr", "0.5"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "completed {'lr': 0.2}\n", done.stderr
