"""Random I/O errors under a whole stream lose nothing and duplicate nothing."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journaled import adds_up, journaled_values, open_stream, put_event, put_metric, stored_values
from kit.programs import run_script, wait_until
from tiers import count_examples

import quark
from quark_core.delivery.delivery_state import Files
from quark_core.errors import SessionStoreError
from quark_core.testing.fakes import ScriptedBackend

CODES = (errno.EIO, errno.EINTR, errno.ENOSPC, errno.EBADF, errno.ESTALE, errno.EAGAIN)


class PatternFiles(Files):
    """Each call takes the next entry of a pattern: None, an errno, or "short" (a short write)."""

    def __init__(self, pattern):
        self.pattern = iter(pattern)

    def _next(self):
        fault = next(self.pattern, None)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return fault

    def make_directory(self, path):
        self._next()
        super().make_directory(path)

    def create(self, path):
        self._next()
        return super().create(path)

    def write(self, descriptor, data):
        if self._next() == "short" and len(data) > 1:
            return super().write(descriptor, data[: len(data) // 2])
        return super().write(descriptor, data)

    def truncate(self, descriptor, size_bytes):
        self._next()
        super().truncate(descriptor, size_bytes)

    def sync(self, descriptor):
        self._next()
        super().sync(descriptor)

    def remove(self, path):
        self._next()
        super().remove(path)


patterns = st.lists(st.one_of(st.none(), st.just("short"), st.sampled_from(CODES)), max_size=60)


@pytest.mark.long
@settings(max_examples=count_examples(60), deadline=None)
@given(pattern=patterns, segment_bytes=st.sampled_from([200, 2_000, 100_000]))
def test_any_pattern_of_errors_loses_nothing_and_duplicates_nothing(pattern, segment_bytes):
    directory = Path(tempfile.mkdtemp()) / "j"
    backend = ScriptedBackend(["unavailable", "lost_reply"])
    stream = open_stream(
        directory,
        backend,
        files=PatternFiles(pattern),
        segment_bytes=segment_bytes,
        window_bytes=500,
        tick_s=0.001,
    )
    for value in range(120):
        put_metric(stream, value)
        if value % 20 == 0:
            put_event(stream)
            level = "durable" if value % 40 else "journaled"
            try:
                stream.flush(0.01, level)
            except SessionStoreError as error:
                assert "Nothing is lost" in str(error)  # noqa: PT017
    stream.flush(30)
    (lane,) = stream.close(10).lanes
    assert lane.complete
    assert stored_values(backend) == list(map(float, range(120)))
    shutil.rmtree(directory.parent)


@pytest.mark.long
@settings(max_examples=count_examples(15), deadline=None)
@given(pattern=patterns)
def test_what_is_called_durable_can_be_read_whatever_failed_before(pattern):
    directory = Path(tempfile.mkdtemp()) / "j"
    backend = ScriptedBackend(always="unavailable")
    stream = open_stream(directory, backend, files=PatternFiles(pattern), segment_bytes=500)
    for value in range(40):
        put_metric(stream, value)
        if value % 10 == 9:
            try:
                stream.flush(0.3, "durable")
            except SessionStoreError:
                continue
            assert journaled_values(directory)[: value + 1] == list(map(float, range(value + 1)))
    (lane,) = stream.close(0.3).lanes
    assert adds_up(lane)
    assert lane.waiting == lane.submitted == 40
    assert wait_until(lambda: not stream._thread.is_alive())
    shutil.rmtree(directory.parent)


class DeadDisk(Files):
    """Fails every operation."""

    def create(self, path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_never_works_costs_the_journal_only(tmp_path, caplog):
    backend = ScriptedBackend(always="hang")
    stream = open_stream(tmp_path / "j", backend, files=DeadDisk())
    for value in range(2_000):
        put_metric(stream, value)
    with pytest.raises(SessionStoreError, match="Nothing is lost"):
        stream.flush(0.1, "journaled")
    backend._always = "ok"
    backend.release.set()
    stream.flush(10)
    assert stream.close(5).complete
    assert stored_values(backend) == list(map(float, range(2_000)))
    assert caplog.text.count("cannot be written") == 1


TRAIN_IN_A_STORM = """
import ctypes, errno, logging
# libfiu shortens a write by dividing by its length, which ends the process where that is 0,
# as in the tracebacks that logging prints when it cannot write either.
logging.raiseExceptions = False
fiu = ctypes.CDLL("libfiu.so.0")
fiu.fiu_enable_random.argtypes = [
    ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_float
]
call = CALL
with quark.start_run(project="p", storage_dir=storage_dir) as session:
    metrics = quark.MetricsLogger(session)
    out = session.run_id
    assert fiu.fiu_enable_random(call, 1, errno.EIO, 0, 0.05) == 0
    for step in range(3000):
        metrics.log("m", float(step), step=step)
        if step % 50 == 0:
            time.sleep(0.005)
    fiu.fiu_disable(call)
    session.flush()
print(out, session.report_delivery().complete)
"""


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("posix/io/rw/write", marks=pytest.mark.long),
        "posix/io/rw/*",
        pytest.param("posix/io/sync/*", marks=pytest.mark.long),
    ],
)
def test_a_storm_of_errors_from_the_system_loses_nothing(tmp_path, call):
    if shutil.which("fiu-run") is None:
        pytest.skip("needs fiu-run (package fiu-utils)")
    body = TRAIN_IN_A_STORM.replace("CALL", repr(call.encode()))
    output, errors = run_script(tmp_path, body, before=["fiu-run", "-x"])
    run_id, complete = output.split()
    assert complete == "True", errors
    metrics = quark.MetricsLogger(quark.open_run(run_id, tmp_path))
    found = [record.value for record in metrics.read(metric_key="m")]
    assert found == list(map(float, range(3_000)))
