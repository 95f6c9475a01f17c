"""The code of trainings that go to a service: hashes, until its owner says more."""

import os
import subprocess
import sys

import pytest
from service_fixtures import serving
from wide_bounds import keep_sources_in_children

import quark
from quark_backends.service.server.config import load_config

TRAIN = """
import quark
with quark.start_run(project="p") as session:
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
print(session.run_id)
"""
TEXT = "NOBODY_ELSE_HAS_THIS = 1\n"


@pytest.fixture
def keeping(tmp_path, monkeypatch):
    """A server whose owner wants sources."""
    with serving(tmp_path / "server", keep_sources=True) as running:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", running.url)
        monkeypatch.setenv("QUARK_USER_KEY", running.make_key("default"))
        yield running


def train(tmp_path):
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    (project / "pyproject.toml").touch()
    (project / "train.py").write_text(TRAIN + TEXT)
    environ = {**os.environ, **keep_sources_in_children()}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return project, done.stdout.split()[-1]


def find_packs(folder):
    """Files of a server in which code stands."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if file.read_bytes()[:2] == b"PK"]


@pytest.mark.long
def test_a_service_has_hashes_alone_until_its_owner_says_more(service, tmp_path):
    project, run_id = train(tmp_path)
    kept = quark.read_sources(run_id, project)
    assert (list(kept), kept["train.py"].text) == (["train.py"], None)
    assert "its owner has not allowed source snapshots" in kept["train.py"].reason
    assert find_packs(tmp_path / "server") == []


@pytest.mark.long
def test_a_service_whose_owner_says_so_keeps_them(keeping, tmp_path):
    project, run_id = train(tmp_path)
    kept = quark.read_sources(run_id, project)
    assert kept["train.py"].text.endswith(TEXT)
    assert len(find_packs(tmp_path / "server")) == 1
    # Another run of the same code.
    _, again = train(tmp_path)
    assert quark.read_sources(again, project)["train.py"].is_exact


@pytest.mark.long
def test_a_service_over_postgresql_keeps_them_too(tmp_path, postgres_service_url, monkeypatch):
    place = tmp_path / "server"
    with serving(place, store_url=postgres_service_url, keep_sources=True) as running:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", running.url)
        monkeypatch.setenv("QUARK_USER_KEY", running.make_key("default"))
        project, run_id = train(tmp_path)
        kept = quark.read_sources(run_id, project)
    assert kept["train.py"].is_exact
    assert kept["train.py"].text.endswith(TEXT)


def test_the_switch_stands_in_options_environment_and_file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("keep_sources = true\n")
    assert load_config({}, {}).keep_sources is False
    assert load_config({"keep_sources": True}, {}).keep_sources is True
    assert load_config({}, {"QUARK_SERVE_KEEP_SOURCES": "true"}).keep_sources is True
    assert load_config({}, {}, path).keep_sources is True
