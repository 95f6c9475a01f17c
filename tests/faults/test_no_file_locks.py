"""Journaling and syncing need no file locks and no mmap, which network file systems may lack."""

import ast
import csv
import fcntl
import mmap
import os
from pathlib import Path

import pytest
from kit.programs import log_steps

import quark
import quark_core.delivery
from quark_core.errors import BackendUnavailable
from quark_core.runs import recovery


def refuse(*_args, **_kwargs):
    raise OSError("this file system has no locks and no mmap")


@pytest.fixture
def bare_file_system(monkeypatch):
    """Refuses what network file systems may not have."""
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, refuse)
    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(os, "link", refuse)
    if hasattr(os, "lockf"):
        monkeypatch.setattr(os, "lockf", refuse)
    opened, real_open, real_fcntl = [], os.open, fcntl.fcntl

    def open_file(path, flags, *args, **kwargs):
        opened.append((path, flags))
        return real_open(path, flags, *args, **kwargs)

    def control(descriptor, command, *args):
        assert command not in (fcntl.F_SETLK, fcntl.F_SETLKW)
        return real_fcntl(descriptor, command, *args)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(fcntl, "fcntl", control)
    return opened


def mirrored(session):
    found = []
    for path in sorted((session.run_path / "csv").glob("metrics_long*.csv")):
        with path.open(newline="") as file:
            found += [float(row["value"]) for row in csv.DictReader(file)]
    return sorted(found)


def test_a_run_needs_no_locks(tmp_path, bare_file_system):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        log_steps(metrics, 1000)
        session.flush("durable")
    assert session.report_delivery().complete
    assert mirrored(session) == list(map(float, range(1_000)))
    journal = [flags for path, flags in bare_file_system if str(path).endswith(".qj")]
    assert journal
    assert not any(flags & os.O_APPEND for flags in journal)


@pytest.mark.long
def test_syncing_needs_no_locks(tmp_path, bare_file_system, monkeypatch):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv") as session:
        metrics = quark.MetricsLogger(session)
        session.flush()
        for lane in session.open_run.stream._lanes:
            lane._open_backend = fail
            lane._backend = None
        log_steps(metrics, 1000)
    assert not session.report_delivery().complete
    assert {result.state for result in recovery.sync(tmp_path)} == {"delivered"}
    assert recovery.survey(tmp_path) == []
    assert mirrored(session) == list(map(float, range(1_000)))


def fail():
    raise BackendUnavailable("planted outage")


def test_no_module_of_delivery_imports_locks_or_mmap():
    for path in Path(quark_core.delivery.__file__).parent.glob("*.py"):
        if path.name.startswith("crash_buffer"):
            continue  # opt-in, and on this machine's own memory, never on a file system
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
        assert not names & {"fcntl", "mmap", "msvcrt", "sqlite3", "portalocker"}, path
