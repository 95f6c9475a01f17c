"""A lane delivers in order, isolates its backend, and its report always adds up."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import count_examples

from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.delivery_worker import Lane, RetryPolicy
from quark_core.delivery.sending import GROUP_RECORDS, Quarantine, cut_groups
from quark_core.testing.fakes import BatchMaker, ScriptedBackend

QUICK = RetryPolicy(first_s=0.001, cap_s=0.002, failures_before_rest=3, rest_s=0.002)


def make_lane(backend, log, *, directory=None, retry=QUICK, **arguments):
    opened = backend if callable(backend) else lambda: backend
    return Lane(
        "scripted", opened, log.open_cursor(), Quarantine(directory, "x"), retry=retry, **arguments
    )


def fill(log, count, records=2):
    maker = BatchMaker("run0")
    batches = [
        maker.metrics(*[("m", step, float(number)) for step in range(records)])
        for number in range(count)
    ]
    for batch in batches:
        log.append(batch)
    return batches


def assert_adds_up(report):
    quarantined = sum(report.quarantined.values())
    done = report.delivered + quarantined + report.dropped + report.unknown
    assert report.submitted == done + report.waiting


def finish(lane, timeout_s=60.0):
    lane.close(time.monotonic() + timeout_s)
    return lane.join(timeout_s)


def test_batches_arrive_in_order(tmp_path):
    log, backend = BatchLog(), ScriptedBackend()
    lane = make_lane(backend, log)
    batches = fill(log, 20)
    lane.start()
    assert finish(lane)
    assert backend.stored == batches
    assert backend.closed
    report = lane.report()
    assert (report.submitted, report.delivered, report.state) == (40, 40, "closed")
    assert report.complete


@pytest.mark.long
def test_groups_are_bounded_by_batches_and_by_records():
    maker = BatchMaker("run0")

    def make(*sizes):
        return [maker.metrics(*[("m", 0, 0.0)] * size) for size in sizes]

    def count(batches, *most):
        return [[batch.count for batch in group] for group in cut_groups(batches, *most)]

    half = GROUP_RECORDS // 2
    assert count(make(half, half, 1, half, half)) == [[half, half], [1, half], [half]]
    assert count(make(GROUP_RECORDS + 1, 1)) == [[GROUP_RECORDS + 1], [1]]
    assert list(map(len, count(make(*[1] * 150)))) == [64, 64, 22]
    assert count(make(1, 1, 1), 1) == [[1], [1], [1]]
    assert count([]) == []


def test_an_outage_is_waited_out():
    log, backend = BatchLog(), ScriptedBackend(["unavailable"] * 12)
    lane = make_lane(backend, log)
    batches = fill(log, 3)
    lane.start()
    assert lane.wait_passed(3, 60)
    assert backend.stored == batches
    assert lane.report().errors == {"planted outage": 12}
    finish(lane)


def test_a_lost_reply_duplicates_nothing():
    log, backend = BatchLog(), ScriptedBackend(["lost_reply", "lost_reply"])
    lane = make_lane(backend, log)
    batches = fill(log, 3)
    lane.start()
    assert lane.wait_passed(3, 60)
    assert backend.stored == batches
    finish(lane)


def test_a_refused_batch_goes_to_quarantine_and_the_rest_goes_on(tmp_path):
    log, backend = BatchLog(), ScriptedBackend(["ok", "rejected", "ok"])
    lane = make_lane(backend, log, directory=tmp_path / "quarantine")
    batches = fill(log, 3)
    lane.start()
    assert finish(lane)
    assert backend.stored == [batches[0], batches[2]]
    report = lane.report()
    assert report.quarantined == {"planted refusal": 2}
    assert_adds_up(report)
    (kept,) = Quarantine(tmp_path / "quarantine", "x").load()
    assert (kept.batch, kept.reason) == (batches[1], "planted refusal")


def test_a_quarantine_that_cannot_be_written_keeps_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    quarantine = Quarantine(tmp_path / "file" / "quarantine", "x")
    (batch,) = fill(BatchLog(), 1)
    quarantine.put(batch, "why")
    assert [item.batch for item in quarantine.load()] == [batch]
    assert "memory only" in caplog.text


@pytest.mark.parametrize("fault", ["bug", "exit"])
def test_after_several_bugs_the_lane_rests_and_probes(fault):
    log, backend = BatchLog(), ScriptedBackend(always=fault)
    states = []
    lane = make_lane(backend, log)
    lane._on_failure = lambda error: states.append(lane._state)
    fill(log, 1)
    lane.start()
    while backend.calls < 6:
        time.sleep(0.001)
    assert "resting" in states
    backend._always = "ok"
    assert lane.wait_passed(1, 60)
    assert lane.report().delivered == 2
    finish(lane)


def test_refused_credentials_pause_the_lane_until_it_asks_again():
    log, backend = BatchLog(), ScriptedBackend(["unauthorized"] * 3)
    retry = RetryPolicy(first_s=60.0, cap_s=60.0, paused_s=0.002)
    states = []
    lane = make_lane(backend, log, retry=retry)
    lane._on_failure = lambda error: states.append(type(error).__name__)
    fill(log, 1)
    lane.start()
    assert lane.wait_passed(1, 60)
    assert states == ["BackendUnauthorized"] * 3
    finish(lane)


@pytest.mark.parametrize("ends", [False, True])
def test_a_refreshed_credential_ends_the_pause(ends, monkeypatch):
    monkeypatch.setattr(
        "quark_core.delivery.delivery_worker._LOOK_EVERY_S", 0.01 if not ends else 600.0
    )
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "old")
    log, backend = BatchLog(), ScriptedBackend(["unauthorized"])
    failed = threading.Event()
    lane = make_lane(
        backend,
        log,
        retry=RetryPolicy(paused_s=600.0),
        on_failure=lambda error: failed.set(),
    )
    fill(log, 1)
    lane.start()
    assert failed.wait(30)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "new")
    if not ends:
        assert lane.wait_passed(1, 60)
    assert finish(lane, timeout_s=30)
    assert lane.report().waiting == 0


def test_a_reason_is_logged_once(caplog):
    log, backend = BatchLog(), ScriptedBackend(["unavailable"] * 5 + ["bug"] * 2)
    lane = make_lane(backend, log)
    fill(log, 1)
    lane.start()
    assert lane.wait_passed(1, 60)
    finish(lane)
    # Others may log too: lanes of tests before that were given up.
    messages = [text for text in caplog.messages if "planted" in text]
    assert len(messages) == 2
    assert "planted outage" in messages[0]
    assert "planted bug" in messages[1]


def test_a_backend_that_cannot_be_opened_is_tried_again():
    log, backend, tries = BatchLog(), ScriptedBackend(), []

    def open_it():
        tries.append(1)
        if len(tries) < 4:
            raise OSError("not yet")
        return backend

    lane = make_lane(open_it, log)
    fill(log, 2)
    lane.start()
    assert lane.wait_passed(2, 60)
    assert len(tries) == 4
    finish(lane)


@pytest.mark.parametrize(("idempotent", "delivered"), [(True, 8), (False, 6)])
def test_what_nobody_can_tell_is_sent_again_only_where_that_stores_it_once(idempotent, delivered):
    log, backend = BatchLog(), ScriptedBackend(["ok", "unknown"])
    lane = make_lane(backend, log, idempotent=idempotent)
    fill(log, 4)
    lane.start()
    assert lane.wait_passed(4, 60)
    report = lane.report()
    assert (report.delivered, report.unknown, report.waiting) == (delivered, 8 - delivered, 0)
    assert backend.calls == (5 if idempotent else 4)
    assert_adds_up(report)
    finish(lane)


@pytest.mark.parametrize(("idempotent", "unknown"), [(True, 0), (False, 2)])
def test_a_hanging_backend_is_given_up_at_the_end(idempotent, unknown):
    log, backend = BatchLog(), ScriptedBackend(["ok", "hang"])
    lane = make_lane(backend, log, idempotent=idempotent)
    fill(log, 4)
    lane.start()
    while backend.calls < 2:
        time.sleep(0.001)
    began = time.monotonic()
    assert not finish(lane, timeout_s=0.2)
    assert time.monotonic() - began < 60
    report = lane.report()
    assert (report.delivered, report.unknown, report.waiting) == (2, unknown, 6 - unknown)
    assert_adds_up(report)
    backend.release.set()


def test_the_end_does_not_wait_longer_than_it_may_for_an_outage():
    log, backend = BatchLog(), ScriptedBackend(always="unavailable")
    lane = make_lane(backend, log, retry=RetryPolicy(first_s=60.0, cap_s=60.0))
    fill(log, 2)
    lane.start()
    lane.close(time.monotonic() + 0.3)
    assert lane.join(30)
    report = lane.report()
    assert (report.waiting, report.state) == (4, "closed")
    assert backend.closed


@pytest.mark.parametrize("primary", [False, True])
def test_what_only_a_person_can_mend_is_not_tried_again_at_the_end(primary):
    log, backend = BatchLog(), ScriptedBackend(["unusable"])
    failed = threading.Event()
    lane = make_lane(
        backend,
        log,
        retry=RetryPolicy(paused_s=60.0),
        primary=primary,
        on_failure=lambda error: failed.set(),
    )
    fill(log, 2)
    lane.start()
    assert failed.wait(30)
    assert finish(lane, timeout_s=30)
    assert lane.report().state == "closed"
    # The primary has the run itself, so that it is asked once more.
    assert (backend.calls, lane.report().waiting) == ((3, 0) if primary else (1, 4))


def test_what_turns_out_at_the_end_to_need_a_person_is_tried_once():
    log, backend = BatchLog(), ScriptedBackend(always="unusable")
    lane = make_lane(backend, log)
    fill(log, 2)
    lane.close(time.monotonic() + 600.0)
    lane.start()
    assert lane.join(60)
    assert (backend.calls, lane.report().waiting) == (1, 4)


def test_beyond_the_capacity_the_oldest_go_and_are_counted():
    log = BatchLog(capacity_bytes=2000)
    lane = make_lane(ScriptedBackend(), log)
    batches = fill(log, 50)
    kept = lane._cursor.peek(1000)
    assert kept == batches[-len(kept) :]
    report = lane.report()
    assert report.dropped == 2 * (50 - len(kept)) > 0
    assert_adds_up(report)


def test_each_lane_has_its_own_cursor():
    log = BatchLog()
    slow, quick = ScriptedBackend(["hang"]), ScriptedBackend()
    lanes = [make_lane(slow, log), make_lane(quick, log)]
    for lane in lanes:
        lane.start()
    batches = fill(log, 5)
    assert lanes[1].wait_passed(5, 60)
    assert quick.stored == batches
    assert slow.stored == []
    slow.release.set()
    assert lanes[0].wait_passed(5, 60)
    assert slow.stored == batches
    for lane in lanes:
        finish(lane)


FAULTS = st.sampled_from(["ok", "unavailable", "lost_reply", "rejected", "bug", "exit"])


@pytest.mark.long
@settings(max_examples=count_examples(60), deadline=None)
@given(
    script=st.lists(FAULTS, max_size=25),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    capacity_bytes=st.sampled_from([600, 3000, 10**6]),
    ends_in=st.sampled_from(["ok", "hang"]),
    idempotent=st.booleans(),
)
def test_nothing_disappears(script, sizes, capacity_bytes, ends_in, idempotent):
    log = BatchLog(capacity_bytes)
    backend = ScriptedBackend(script, always=ends_in)
    lane = make_lane(backend, log, idempotent=idempotent)
    wrong, done = [], threading.Event()

    def watch():
        while not done.is_set():
            report = lane.report()
            total = report.delivered + report.waiting + report.dropped + report.unknown
            if report.submitted != total + sum(report.quarantined.values()):
                wrong.append(report)

    watcher = threading.Thread(target=watch)
    watcher.start()
    lane.start()
    maker = BatchMaker("run0")
    for size in sizes:
        log.append(maker.metrics(*[("m", step, 0.0) for step in range(size)]))
    finish(lane, timeout_s=0.05 if ends_in == "hang" else 60.0)
    report = lane.report()
    done.set()
    watcher.join()
    backend.release.set()
    assert wrong == []
    assert report.submitted == sum(sizes)
    assert_adds_up(report)
    # What the report says is at the backend is there; what came twice is there once.
    assert len({batch.number for batch in backend.stored}) == len(backend.stored)
    if ends_in == "ok":
        assert report.waiting == report.unknown == 0
        # A reply that was lost, then a refusal: those records are in the store and in quarantine.
        assert backend.count_records >= report.delivered
        if "lost_reply" not in script:
            assert backend.count_records == report.delivered
