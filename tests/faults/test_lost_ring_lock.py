"""A Ctrl-C inside of the black box may take its lock along; it comes back."""

import os
from pathlib import Path

import pytest

from quark_core.delivery import black_box
from quark_core.delivery.black_box import BlackBox, read_black_box
from quark_core.delivery.origin import Origin
from quark_core.records import EventRecord

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or not hasattr(os, "posix_fallocate"),
    reason="needs shared memory",
)


def event(sequence):
    return EventRecord("run0", "writer0", 0, 0, sequence, 6, "saved", "info")


def test_a_lock_that_nobody_holds_is_given_back(tmp_path, monkeypatch):
    moments_s = [100.0]
    monkeypatch.setattr(black_box.time, "monotonic", lambda: moments_s[-1])
    box = BlackBox(tmp_path / "box", size_bytes=4096)
    append = box.wrap_append([].append)
    append(event(0))
    box._lock.acquire()  # as an interrupt leaves it between taking and trying
    append(event(1))
    assert box.uncovered == 1
    for moment_s in (100.1, 100.5, 100.9):
        moments_s.append(moment_s)
        box.mark()
        assert box._lock.locked()
    for moment_s in (101.2, 101.6):
        moments_s.append(moment_s)
        box.mark()
    append(event(2))
    assert box.uncovered == 1
    found = read_black_box(box.path, Origin("run0", "writer0"))[0]
    assert [record.sequence for record in found] == [0, 2]


def test_a_lock_in_use_is_left_alone(tmp_path, monkeypatch):
    moments_s = [100.0]
    monkeypatch.setattr(black_box.time, "monotonic", lambda: moments_s[-1])
    box = BlackBox(tmp_path / "box", size_bytes=64 * 1024)
    for number in range(50):
        moments_s.append(100.0 + number)
        box._lock.acquire()
        box._entered += 1  # another thread came in since the last tick
        box.mark()
        assert box._lock.locked()
        box._lock.release()
