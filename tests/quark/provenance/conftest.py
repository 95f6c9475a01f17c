"""Programs in projects of their own, whose sources are kept."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from wide_bounds import keep_sources_in_children

import quark

TRAIN = """
    import quark
    session = quark.start_run(project="p", storage_dir={store!r})
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    {body}
    session.end_run()
    print(session.run_id)
"""


class Project:
    """A folder with programs, and a store beside it."""

    def __init__(self, root: Path, store: Path):
        self.root, self.store = root, store

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def write_training(self, imports="", body="pass", path="train.py"):
        text = textwrap.dedent(TRAIN).format(store=str(self.store), body=body)
        return self.write(path, f"{imports}\n{text}")

    def run(self, *arguments, cwd=None, stdin=None, check=True, **environment):
        """Run Python; returns what it has done."""
        environ = {**os.environ, **keep_sources_in_children(), **environment}
        environ = {name: value for name, value in environ.items() if value is not None}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd or self.root,
            env=environ,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done

    def train(self, *arguments, **options):
        """Run a program that prints its run's id at the end; returns the id."""
        done = self.run(*(arguments or ("train.py",)), **options)
        return done.stdout.split()[-1]

    def read(self, run_id, attempt=None):
        return quark.read_sources(run_id, self.store, attempt=attempt)

    def list_payloads(self, run_id):
        """Payloads of a run on the disk, by name -> how many names each has."""
        folder = self.store / ".quark" / "runs" / run_id / "artifacts" / ".objects"
        return {file.name: file.stat().st_nlink for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    (root / "pyproject.toml").write_text("")
    return Project(root, tmp_path / "store")
