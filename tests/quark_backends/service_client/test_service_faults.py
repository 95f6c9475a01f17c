"""Training goes on whatever happens to the service, and everything arrives once."""

import logging
import os
import subprocess
import sys
import time

import msgspec
import pytest

import quark
from quark_backends.service.client.backend import ServiceBackend
from quark_core.backends.contract import BackendConfig
from quark_core.delivery.delivery_worker import RetryPolicy
from quark_core.errors import BackendRejected, BackendUnavailable, SessionStoreError
from quark_core.runs import recovery
from quark_core.testing.fakes import BatchMaker


def open_backend(tmp_path, url, **arguments):
    return ServiceBackend(
        BackendConfig(storage_dir=tmp_path, run_path=tmp_path, location=url, **arguments)
    )


@pytest.fixture
def fast_lanes(monkeypatch):
    """Lanes that come back soon, so that an outage of a test is over soon."""
    for name, value in {"first_s": 0.05, "cap_s": 0.2, "paused_s": 0.2, "rest_s": 0.2}.items():
        field = RetryPolicy.__init__.__kwdefaults__
        monkeypatch.setitem(field, name, value)


def log_steps(metrics, steps):
    """Log a metric each step; returns the longest that a call took, in seconds."""
    slowest_s = 0.0
    for step in steps:
        started_s = time.perf_counter()
        metrics.log("train/loss", 1.0 / (step + 1), step=step)
        slowest_s = max(slowest_s, time.perf_counter() - started_s)
    return slowest_s


@pytest.mark.long
def test_a_reply_that_is_lost_after_the_commit_duplicates_nothing(proxied, tmp_path, count_rows):
    backend = open_backend(tmp_path, proxied.url)
    maker = BatchMaker("run0")
    backend.write(maker.start())
    sent = 0
    for number in range(12):
        group = [maker.metrics(("m", number, 1.0), ("m", number, 2.0)) for _ in range(5)]
        sent += 10
        proxied.set_mode("lose_reply")
        with pytest.raises(BackendUnavailable):
            backend.write_group(group)
        proxied.set_mode("pass")
        backend.write_group(group)
    backend.close()
    # Each group was sent twice under the fault: the retry at once, too, lost its reply.
    assert proxied.counts["lose_reply"] == 24
    assert count_rows("run0") == (60, sent)


def test_other_bytes_under_a_known_identity_go_to_the_quarantine(service, tmp_path, count_rows):
    backend = open_backend(tmp_path, service.url)
    maker = BatchMaker("run0")
    backend.write(maker.start())
    batch = maker.metrics(("m", 0, 1.0))
    backend.write(batch)
    backend.write(batch)
    other = msgspec.structs.replace(BatchMaker("run0").metrics(("m", 0, 9.0)), number=batch.number)
    with pytest.raises(BackendRejected, match="other content"):
        backend.write(other)
    with pytest.raises(BackendRejected):
        backend.write_group([maker.metrics(("m", 1, 1.0)), other])
    backend.close()
    assert count_rows("run0") == (1, 1)


@pytest.mark.long
def test_an_outage_is_not_felt_by_training(proxied, fast_lanes, tmp_path, count_rows):
    with (
        quark.start_run(project="p", storage_dir=tmp_path / "runs") as session,
        quark.MetricsLogger(session) as metrics,
    ):
        log_steps(metrics, range(500))
        metrics.flush()
        slowest_s = 0.0
        for number, mode in enumerate(("hang", "refuse", "reset", "503", "garbage", "lose_reply")):
            proxied.set_mode(mode)
            first = 500 * (number + 1)
            slowest_s = max(slowest_s, log_steps(metrics, range(first, first + 500)))
            time.sleep(0.4)
        proxied.set_mode("pass")
        log_steps(metrics, range(3500, 4000))
        metrics.flush()
        assert count_rows(session.run_id)[1] == 4000
    # A call that waited for a server that hangs would take 15 s.
    assert slowest_s < 12
    report = session.report_delivery()
    (lane,) = report.lanes
    assert (lane.waiting, lane.dropped, lane.quarantined) == (0, 0, {})
    steps = [r.step for r in quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read()]
    assert steps == list(range(4000))


@pytest.mark.long
def test_a_run_that_ends_in_an_outage_is_delivered_by_sync(
    proxied, tmp_path, count_rows, monkeypatch
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    session = quark.start_run(project="p", storage_dir=tmp_path / "runs")
    with quark.MetricsLogger(session) as metrics:
        log_steps(metrics, range(100))
        metrics.flush()
        proxied.set_mode("refuse")
        log_steps(metrics, range(100, 200))
        session.end_run()
    assert count_rows(session.run_id)[1] == 100
    (waiting,) = [lane for lane in recovery.survey(tmp_path / "runs") if lane.waiting]
    assert waiting.backend == "service"
    results = recovery.sync(tmp_path / "runs")
    assert {result.state for result in results} == {"waiting"}
    assert "cannot be reached" in results[0].reason
    proxied.set_mode("pass")
    assert {result.state for result in recovery.sync(tmp_path / "runs")} == {"delivered"}
    assert count_rows(session.run_id)[1] == 200
    assert recovery.survey(tmp_path / "runs") == []
    opened = quark.open_run(session.run_id, tmp_path / "runs")
    assert opened.status == "completed"


@pytest.mark.long
def test_a_key_that_is_revoked_stops_delivery_and_nothing_else(
    service, tmp_path, count_rows, monkeypatch, caplog
):
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "0.5")
    session = quark.start_run(project="p", storage_dir=tmp_path / "runs")
    with quark.MetricsLogger(session) as metrics, caplog.at_level(logging.WARNING, "quark"):
        log_steps(metrics, range(10))
        metrics.flush()
        service.revoke(service.key)
        for first in (10, 20, 30):
            log_steps(metrics, range(first, first + 10))
            with pytest.raises(SessionStoreError):
                session.flush(timeout_s=0.3)
        deadline = time.monotonic() + 60
        while session.report_delivery().lanes[0].state != "paused":
            assert time.monotonic() < deadline, session.report_delivery()
            time.sleep(0.01)
        session.end_run()
    warnings = [r.getMessage() for r in caplog.records if "accepts no records" in r.getMessage()]
    assert len(warnings) == 1
    assert "QUARK_USER_KEY" in warnings[0]
    assert service.key not in caplog.text
    assert count_rows(session.run_id)[1] == 10
    with pytest.raises(SessionStoreError, match="QUARK_USER_KEY"):
        quark.open_run(session.run_id, tmp_path / "runs")
    with pytest.raises(SessionStoreError, match="QUARK_USER_KEY"):
        quark.start_run(project="p", storage_dir=tmp_path / "other")
    (result,) = recovery.sync(tmp_path / "runs")
    assert (result.state, "QUARK_USER_KEY" in result.reason) == ("waiting", True)
    monkeypatch.setenv("QUARK_USER_KEY", service.make_key("default"))
    (result,) = recovery.sync(tmp_path / "runs")
    assert (result.state, result.waiting) == ("delivered", 0)
    assert count_rows(session.run_id)[1] == 40


@pytest.mark.sampled
@pytest.mark.parametrize("by_file", [False, True])
def test_a_rotated_key_is_taken_up(service, tmp_path, count_rows, monkeypatch, by_file):
    path = tmp_path / "key"
    if by_file:
        path.write_text(service.key + "\n")
        monkeypatch.setenv("QUARK_USER_KEY_FILE", str(path))
        monkeypatch.delenv("QUARK_USER_KEY")
    with (
        quark.start_run(project="p", storage_dir=tmp_path / "runs") as session,
        quark.MetricsLogger(session) as metrics,
    ):
        metrics.log("m", 1.0, step=0)
        metrics.flush()
        key = service.make_key("default")
        service.revoke(service.key)
        if by_file:
            path.write_text(f"{key}\n")
        else:
            monkeypatch.setenv("QUARK_USER_KEY", key)
        metrics.log("m", 2.0, step=1)
        metrics.flush()
        assert len(metrics.read()) == 2
    assert count_rows(session.run_id)[1] == 2


@pytest.mark.parametrize("key", ["", "qk_a b", "schlüssel", "x" * 2000, "qk_\x00"])
def test_a_missing_or_bad_key_is_said_at_once(service, tmp_path, monkeypatch, key):
    if "\x00" in key:
        path = tmp_path / "key"
        path.write_text(key)
        monkeypatch.setenv("QUARK_USER_KEY_FILE", str(path))
        key = ""
    monkeypatch.setenv("QUARK_USER_KEY", key)
    with pytest.raises(SessionStoreError, match="QUARK_USER_KEY") as caught:
        quark.start_run(project="p", storage_dir=tmp_path / "runs")
    assert not key or key not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_key_that_may_only_read(service, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_USER_KEY", service.make_key("default", "read"))
    with pytest.raises(SessionStoreError, match="cannot write"):
        quark.start_run(project="p", storage_dir=tmp_path / "runs")
    assert quark.search_runs(storage_dir=tmp_path) == ()


@pytest.mark.long
def test_an_outage_in_the_middle_of_a_payload(proxied, fast_lanes, tmp_path):
    content = os.urandom(4_000_000)
    (tmp_path / "file").write_bytes(content)
    with quark.start_run(project="p", storage_dir=tmp_path / "runs") as session:
        artifacts = quark.ArtifactStore(session)
        for mode in ("lose_reply", "reset", "500"):
            proxied.set_mode(mode)
            record = artifacts.log_file(tmp_path / "file", name=f"file-{mode}")
            time.sleep(0.3)
        proxied.set_mode("pass")
        session.flush()
    opened = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path))
    assert opened.load_file(record, tmp_path / "copy").read_bytes() == content


@pytest.mark.long
def test_a_killed_process_is_delivered_by_the_next_one(service, tmp_path, count_rows):
    program = (
        "import os, sys, quark\n"
        "s = quark.start_run(project='p', storage_dir=sys.argv[1])\n"
        "m = quark.MetricsLogger(s)\n"
        "for step in range(100): m.log('m', float(step), step=step)\n"
        "print(s.run_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "runs")], capture_output=True, text=True
    )
    run_id = done.stdout.strip()
    assert {result.state for result in recovery.sync(tmp_path / "runs")} == {"delivered"}
    assert count_rows(run_id)[1] == 100


@pytest.mark.long
def test_a_folder_is_used_for_both_kinds_of_store(service, tmp_path, monkeypatch):
    first = quark.start_run(project="p", storage_dir=tmp_path)
    first.end_run()
    monkeypatch.delenv("QUARK_PERSISTENCE_URL")
    second = quark.start_run(project="p", storage_dir=tmp_path)
    second.end_run()
    assert [run.run_id for run in quark.search_runs(storage_dir=tmp_path)] == [second.run_id]
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", service.url)
    assert quark.open_run(first.run_id, tmp_path).status == "completed"


def test_plain_http_to_another_machine_is_warned_of_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUARK_USER_KEY", "qk_a_b")
    monkeypatch.setenv("QUARK_PERSISTENCE_TIMEOUT_SECONDS", "0.2")
    monkeypatch.setattr("quark_backends.service.client.http_client._warned", set())
    for _ in range(2):
        open_backend(tmp_path, "http://quark.example.invalid").close()
        open_backend(tmp_path, "https://quark.example.invalid").close()
    assert [r.getMessage() for r in caplog.records if "unencrypted" in r.getMessage()] == [
        "the connection to the Quark server http://quark.example.invalid uses plain http, so the "
        "key and all data cross the network unencrypted"
    ]


def test_a_proxy_of_the_environment_is_used(proxied, tmp_path, monkeypatch):
    # What a forward proxy is asked for stands in the request's first line.
    proxied.set_mode("502")
    monkeypatch.setenv("http_proxy", proxied.url)
    backend = open_backend(tmp_path, "http://quark.example.invalid/prefix")
    with pytest.raises(BackendUnavailable, match="502"):
        backend.write(BatchMaker("run0").start())
    assert proxied.requests[-1].startswith(
        b"POST http://quark.example.invalid/prefix/v1/runs/run0/batches HTTP/1.1"
    )
    monkeypatch.setenv("no_proxy", "quark.example.invalid")
    backend.close()
    with pytest.raises(BackendUnavailable, match="resolved"):
        backend.write(BatchMaker("run0").start())


@pytest.mark.parametrize(
    "url",
    [
        "https://ada:s3cr3t@quark.example.org",
        "https://s3cr3t@quark.example.org",
        "https://",
        "https://quark.example.org:port",
        "ftp+https://s3cr3t@x",
        "https://quark.example.org?stroe=x",
        "https://quark.example.org?timeout=soon",
        "service:s3cr3t@nowhere",
    ],
)
def test_bad_urls_are_refused_without_their_secrets(tmp_path, monkeypatch, url):
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", url)
    monkeypatch.setenv("QUARK_USER_KEY", "qk_a_b")
    with pytest.raises(SessionStoreError, match="QUARK_PERSISTENCE_URL") as caught:
        quark.start_run(project="p", storage_dir=tmp_path / "runs")
    assert "s3cr3t" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
