"""What tests of artifacts look at: objects on the disk, events, scripts."""

import hashlib

from kit.programs import run_file

import quark

HEAD = """
import hashlib, multiprocessing, os, sys, threading, quark
storage_dir = sys.argv[1]
"""


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def list_objects(session):
    """Hash of each payload on the disk -> its path."""
    root = session.run_path / "artifacts" / ".objects"
    return {path.name: path for path in root.glob("*/*")}


def list_scratch(session):
    """Files that somebody has begun and nobody has finished."""
    root = session.run_path / "artifacts"
    left = list((root / ".partial").glob("*")) if (root / ".partial").exists() else []
    return left + list(root.rglob("*.part"))


def assert_clean(session):
    """No half file: each object is what its name says, and nothing is left beside."""
    for name, path in list_objects(session).items():
        assert sha256(path.read_bytes()) == name
    assert list_scratch(session) == []


def assert_whole(artifacts, record, data):
    """A record is true in every way of looking at it."""
    assert (record.sha256, record.size_bytes) == (sha256(data), len(data))
    with artifacts.open(record) as file:
        assert file.read() == data
    run_path = artifacts._run.context.run_path
    assert (run_path / record.payload_relative_path).read_bytes() == data


def list_events(session, event_type):
    return quark.EventLogger(session).read(event_type=event_type)


def run_script(tmp_path, body, *arguments, **environment):
    """Run a script in a process of its own; returns its standard output."""
    return run_file(tmp_path, body, *arguments, head=HEAD, **environment)
