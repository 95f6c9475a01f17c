"""A backend in a process of its own does what it would do in ours; its end harms nobody."""

import hashlib
import logging
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from hosted_samples import open_keeper, open_recorder
from kit.programs import start_code, wait_until

import quark
from quark_core.backends.contract import BackendConfig, BackendDefinition, Capability, Payload
from quark_core.backends.registry import default_registry
from quark_core.errors import (
    BackendError,
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
)
from quark_core.hosting import child_process
from quark_core.hosting.child_process import prefer_helpers
from quark_core.hosting.hosted_backend import can_be_hosted, open_hosted
from quark_core.hosting.protocol import dump_value, load_value
from quark_core.records import RECORD_TYPES
from quark_core.records.columns import Columns
from quark_core.testing.fakes import BatchMaker, make_samples

RECORDER = BackendDefinition(
    name="recorder",
    summary="a line per batch",
    open=open_recorder,
    capabilities=frozenset({Capability.IDEMPOTENT}),
    own_process=True,
)
KEEPER = replace(
    RECORDER,
    open=open_keeper,
    capabilities=frozenset({Capability.IDEMPOTENT, Capability.GROUPS, Capability.ARTIFACTS}),
)


@pytest.fixture
def config(tmp_path):
    return BackendConfig(
        storage_dir=tmp_path,
        run_path=tmp_path / "run",
        run_id="run0",
        project="hosted",
        location=str(tmp_path / "lines"),
    )


@pytest.fixture
def maker():
    return BatchMaker("run0")


@pytest.fixture
def lines(tmp_path):
    def read():
        return [line.split() for line in (tmp_path / "lines").read_text().splitlines()]

    return read


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_batches_are_stored_by_another_process_which_ends_at_the_close(config, maker, lines):
    backend = open_hosted(RECORDER, config)
    for batch in (maker.start(), maker.metrics(("m", 0, 0.0))):
        backend.write(batch)
    backend.close()
    pids, what, numbers = zip(*lines(), strict=True)
    assert (what, numbers) == (("write", "write", "close"), ("0", "1", "-1"))
    (pid,) = set(map(int, pids))
    assert pid != os.getpid()
    assert is_gone(pid)
    assert not list((config.run_path / "mirrors").rglob("*"))


def read_session_niceness(pid):
    """0 for a process that is in no session of its own, of which the system says nothing."""
    words = Path(f"/proc/{pid}/autogroup").read_text().split()
    return int(words[-1]) if words else 0


def test_training_goes_before_it(config, maker, lines):
    backend = open_hosted(RECORDER, config)
    backend.write(maker.start())
    helper = psutil.Process(int(lines()[0][0]))
    assert helper.nice() == min(19, psutil.Process().nice() + 10)
    session = Path(f"/proc/{helper.pid}/autogroup")
    if session.exists():  # "/autogroup-123 nice 10"
        assert read_session_niceness(helper.pid) == 10
    prefer_helpers()
    # Nobody trains any more, and the end of the run waits for it.
    if os.geteuid() == 0:
        assert helper.nice() == psutil.Process().nice()
    if session.exists():
        assert read_session_niceness(helper.pid) == read_session_niceness("self")
    backend.close()


def test_one_of_a_process_that_trains_nothing_has_its_share(config, maker, lines, monkeypatch):
    monkeypatch.setattr(child_process, "_starts_equals", True)
    backend = open_hosted(RECORDER, config)
    backend.write(maker.start())
    assert psutil.Process(int(lines()[0][0])).nice() == psutil.Process().nice()
    backend.close()


def test_groups_and_payloads_go_the_same_way(config, maker, lines, tmp_path):
    backend = open_hosted(KEEPER, config)
    (tmp_path / "payload").write_text("content")
    sha256 = hashlib.sha256(b"content").hexdigest()
    backend.put_payload(
        Payload(run_id="run0", sha256=sha256, size_bytes=7, path=tmp_path / "payload")
    )
    backend.write_group([maker.start(), maker.metrics(("m", 0, 0.0))])
    backend.close()
    assert [line[1:] for line in lines()] == [
        ["content", "7"],
        ["group", "2"],
        ["write", "0"],
        ["write", "1"],
        ["close", "-1"],
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("rejected", BackendRejected, "will never do"),
        ("unavailable", BackendUnavailable, "come again"),
        ("unauthorized", BackendUnauthorized, "no key"),
        ("unusable", BackendUnusable, "no address"),
        ("exit", BackendError, "SystemExit: enough"),
        ("bug", BackendError, "KeyError: 'oops' (hosted_samples.py:"),
    ],
)
def test_what_is_raised_there_is_raised_here(config, maker, fault, kind, text):
    backend = open_hosted(RECORDER, replace(config, options={"fault": fault}))
    for _ in range(2):
        with pytest.raises(BackendError) as caught:
            backend.write(maker.start())
        assert type(caught.value) is kind
        assert text in str(caught.value)
    if fault == "unavailable":
        assert caught.value.retry_after_s == 3.5
    backend.close()


def test_a_token_that_was_refreshed_reaches_the_process_at_the_first_refusal(
    config, maker, monkeypatch, lines, tmp_path
):
    def renew(token):
        (tmp_path / "lines.valid").write_text(token)
        monkeypatch.setenv("RECORDER_TOKEN", token)

    renew("first")
    backend = open_hosted(RECORDER, replace(config, options={"fault": "token"}))
    backend.write(maker.start())
    renew("second")
    backend.write(maker.metrics(("m", 0, 0.0)))
    # Nobody has refreshed it: it is told by its name, and not asked for again and again.
    (tmp_path / "lines.valid").write_text("third")
    with pytest.raises(BackendUnauthorized, match="RECORDER_TOKEN"):
        backend.write(maker.metrics(("m", 1, 0.0)))
    renew("third")
    backend.write(maker.metrics(("m", 1, 0.0)))
    backend.close()
    found = lines()
    assert [line[1] for line in found] == ["write", "write", "write", "close"]
    assert len({line[0] for line in found}) == 3


def find_workers():
    found = []
    for child in psutil.Process().children():
        try:
            if "quark_core.hosting.worker" in child.cmdline():
                found.append(child)
        except psutil.ZombieProcess:
            found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def test_an_opening_that_fails_says_why_and_leaves_no_process(config):
    earlier = set(find_workers())  # one of a test before may be about to end
    with pytest.raises(BackendUnavailable, match="not today") as caught:
        open_hosted(RECORDER, replace(config, options={"fault": "closed"}))
    assert caught.value.retry_after_s == 7.0
    assert wait_until(lambda: set(find_workers()) <= earlier)


def test_a_false_declaration_is_found_out(config):
    with pytest.raises(BackendError, match="does not implement SupportsGroups"):
        open_hosted(replace(KEEPER, open=open_recorder), config)


@pytest.mark.long
def test_a_process_that_is_killed_is_replaced(config, maker, lines):
    backend = open_hosted(RECORDER, config)
    backend.write(maker.start())
    os.kill(int(lines()[0][0]), signal.SIGKILL)
    batch = maker.metrics(("m", 0, 0.0))
    with pytest.raises(BackendUnavailable, match=r"ended \(exit status -9\)"):
        backend.write(batch)
    backend.write(batch)
    backend.close()
    assert [line[1:] for line in lines()] == [["write", "0"], ["write", "1"], ["close", "-1"]]
    assert lines()[0][0] != lines()[1][0]


@pytest.mark.long
def test_what_it_logs_is_logged_here_and_what_it_prints_harms_nothing(config, maker, caplog):
    with caplog.at_level(logging.WARNING, "quark"):
        backend = open_hosted(RECORDER, replace(config, options={"fault": "warning"}))
        backend.write(maker.start())
        backend.close()
        backend = open_hosted(RECORDER, replace(config, options={"fault": "print"}))
        backend.write(maker.start())
        backend.close()
    assert [text for text in caplog.messages if "recorder" in text] == ["backend recorder is odd"]
    log = config.run_path / "mirrors/processes/recorder/process.log"
    assert "to whoever reads" in log.read_text()


@pytest.mark.long
def test_it_ends_with_its_parent_even_by_sigkill(config, lines):
    code = f"""
import sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from pathlib import Path
from test_hosted_backends import RECORDER
from quark_core.backends.contract import BackendConfig
from quark_core.hosting.hosted_backend import open_hosted
from quark_core.testing.fakes import BatchMaker
backend = open_hosted(RECORDER, BackendConfig(
    storage_dir=Path({str(config.storage_dir)!r}), run_path=Path({str(config.run_path)!r}),
    run_id="run0", location={config.location!r}))
backend.write(BatchMaker("run0").start())
print("ready", flush=True)
time.sleep(600)
"""
    parent = start_code(code)
    assert parent.stdout.readline().strip() == "ready"
    pid = int(lines()[0][0])
    assert not is_gone(pid)
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: is_gone(pid))
    # Whoever comes next is not kept out by what it has left.
    again = open_hosted(RECORDER, config)
    again.close()
    assert not list((config.run_path / "mirrors/processes/recorder").glob("*.json"))


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_ends_it_nor_keeps_it(config, maker, lines):
    backend = open_hosted(RECORDER, config)
    backend.write(maker.start())
    pid = int(lines()[0][0])
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        backend.write(maker.metrics(("m", 0, 0.0)))
        backend._writer._child._sender.close()
        assert wait_until(lambda: is_gone(pid))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        backend._writer._child.end()


@pytest.mark.sampled
@pytest.mark.parametrize("helpers", ["", "0"])
def test_a_session_opens_it_so_unless_told_otherwise(config, lines, tmp_path, monkeypatch, helpers):
    monkeypatch.setenv("QUARK_HELPER_PROCESSES", helpers)
    # Else the end waits 2 s for a mirror, in which a busy machine starts no process.
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    monkeypatch.setitem(default_registry()._definitions, "recorder", RECORDER)
    session = quark.start_run(
        project="hosted", storage_dir=tmp_path, backends=f"recorder:{config.location}"
    )
    metrics = quark.MetricsLogger(session)
    for step in range(10):
        metrics.log("m", 0.5, step=step)
    session.end_run()
    assert session.report_delivery().complete
    pids = {int(line[0]) for line in lines()}
    assert (pids == {os.getpid()}) == (helpers == "0")
    assert lines()[-1][1] == "close"


def test_what_another_process_cannot_find_stays_here(config):
    assert can_be_hosted(RECORDER, config)
    for other in (
        replace(RECORDER, open=lambda config: None),
        replace(RECORDER, own_process=False),
    ):
        assert not can_be_hosted(other, config)
    assert not can_be_hosted(RECORDER, replace(config, read_only=True))


# What a helper sends is unpickled: it names types, and no functions.


def name_global(module, name):
    """A pickle that asks for something by its name."""
    return (
        b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)])
    ) + (name.encode() + b"\x93.")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        # Through what a module has imported, to any function there is.
        ("quark_core.hosting.protocol", "io.open"),
        ("quark_core.system.process", "os.system"),
        ("pathlib", "os.system"),
        ("collections", "_sys.exit"),
        ("numpy", "ctypeslib.load_library"),
        ("quark_core.hosting.protocol", "pickle.Unpickler.load"),
        # What a module has imported itself, and functions of its own.
        ("quark_core.hosting.protocol", "io"),
        ("quark_core.hosting.protocol", "load_value"),
        ("quark_core.hosting.child_process", "Popen"),
        ("numpy", "load"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("os", "system"),
    ],
)
def test_only_types_of_a_module_itself_are_named(module, name):
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        load_value(name_global(module, name))


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_records_and_columns_come_through(kind):
    records = make_samples(kind, "r")
    assert load_value(dump_value(records)) == records
    columns = Columns.from_records(kind, records)
    assert load_value(dump_value(columns)).to_records() == tuple(records)


def test_arrays_come_through():
    for array in (
        np.arange(5),
        np.array([[1.5, 2]], order="F"),
        np.array(["a", None], dtype=object),
        np.datetime64("2026-01-01"),
        np.float32(0.5),
    ):
        found = load_value(dump_value(array))
        assert np.array_equal(found, array)
        assert found.dtype == array.dtype
