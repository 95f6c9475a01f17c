"""Runs to store artifacts in, and disks to fill."""

import subprocess

import pytest

import quark


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "runs") as session:
        yield session


@pytest.fixture
def artifacts(session):
    return quark.ArtifactStore(session)


@pytest.fixture
def strict_artifacts(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "strict", strict_mode=True) as session:
        yield quark.ArtifactStore(session)


@pytest.fixture
def small_disk(tmp_path_factory):
    """A disk of 8 MB; skips where mounting is not allowed."""
    directory = tmp_path_factory.mktemp("small")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], capture_output=True)
