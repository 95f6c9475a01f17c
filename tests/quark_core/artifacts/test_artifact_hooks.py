"""Retention hooks: called in order after each artifact, and what becomes of one that raises."""

import logging
import threading

import pytest
from payload_tools import list_events

import quark


def note_into(calls, name):
    def hook(store, record):
        calls.append((name, store, record))

    return hook


@pytest.fixture
def start(tmp_path):
    sessions = []

    def start_one(strict_mode=False):
        sessions.append(quark.start_run(project="p", storage_dir=tmp_path, strict_mode=strict_mode))
        return sessions[-1]

    yield start_one
    for session in sessions:
        session.end_run()


def test_hooks_are_called_in_order_with_what_was_stored(session, tmp_path):
    (tmp_path / "file").write_text("x")
    calls = []
    artifacts = quark.ArtifactStore(
        session, retention_hooks=[note_into(calls, "first"), note_into(calls, "second")]
    )
    records = [
        artifacts.store("t", "n", b"x"),
        artifacts.store_file("t", "n", tmp_path / "file"),
        artifacts.log_file(tmp_path / "file"),
        artifacts.log_histogram("h", bins=[0, 1], counts=[1]),
        artifacts.log_snapshot("s", {}),
        artifacts.log_table("t", {"a": [1]}),
    ]
    assert [name for name, _, _ in calls] == ["first", "second"] * len(records)
    assert [record for _, _, record in calls] == [r for r in records for _ in range(2)]
    assert all(store is artifacts for _, store, _ in calls)


def test_what_a_hook_sees_can_be_loaded(session):
    loaded = []
    artifacts = quark.ArtifactStore(
        session,
        retention_hooks=(
            lambda store, record: loaded.append(store.load(record)),
            lambda store, record: loaded.append(store.load(record.id)),
            lambda store, record: loaded.append(store.read()[-1] == record),
        ),
        raise_on_retention_error=True,
    )
    artifacts.store("t", "n", {"a": 1})
    assert loaded == [{"a": 1}, {"a": 1}, True]


def test_a_refused_call_calls_no_hook(session):
    calls = []
    artifacts = quark.ArtifactStore(session, retention_hooks=[note_into(calls, "hook")])
    with pytest.raises(quark.SchemaValidationError):
        artifacts.store("t", "..", b"x")
    assert calls == []


def fail(store, record):
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("raises", [None, True, False])
def test_a_hook_that_raises(start, strict, raises, caplog):
    session = start(strict)
    calls = []
    artifacts = quark.ArtifactStore(
        session,
        retention_hooks=(note_into(calls, "before"), fail, note_into(calls, "after")),
        raise_on_retention_error=raises,
    )
    if raises or (raises is None and strict):
        with pytest.raises(quark.RetentionHookError, match=r"hook fail raised Zero.*'n'") as said:
            artifacts.store("t", "n", b"kept all the same", step=3)
        assert isinstance(said.value.__cause__, ZeroDivisionError)
        assert [name for name, _, _ in calls] == ["before"]
        assert list_events(session, "retention_hook_failed") == ()
        assert "planted" not in caplog.text
    else:
        for step in (3, 4):
            artifacts.store("t", "n", b"kept all the same", step=step)
        assert [name for name, _, _ in calls] == ["before", "after"] * 2
        events = list_events(session, "retention_hook_failed")
        assert [(event.severity, event.step) for event in events] == [("error", 3), ("error", 4)]
        assert events[0].payload == {
            "artifact_key": "n",
            "reason": "retention hook fail raised ZeroDivisionError",
            "message": "planted",
        }
        said = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len([r for r in said if "retention hook" in r.getMessage()]) == 1
    (record, *_) = artifacts.read()
    assert artifacts.load(record) == b"kept all the same"


def test_the_next_artifact_is_stored_after_a_hook_has_raised(session):
    stored = []

    def fail_once(store, record):
        stored.append(record)
        if len(stored) == 1:
            raise ValueError("once")

    artifacts = quark.ArtifactStore(
        session, retention_hooks=[fail_once], raise_on_retention_error=True
    )
    with pytest.raises(quark.RetentionHookError):
        artifacts.store("t", "n", 1)
    artifacts.store("t", "n", 2)
    assert [artifacts.load(record) for record in stored] == [1, 2]
    assert artifacts.read() == tuple(stored)


def test_a_hook_that_stores_calls_no_hooks(session):
    depth = []

    def derive(store, record):
        depth.append(record.artifact_type)
        store.store("derived", record.artifact_key, {"of": record.sha256}, step=record.step)

    artifacts = quark.ArtifactStore(session, retention_hooks=[derive, derive])
    artifacts.store("t", "n", b"x", step=1)
    artifacts.store("t", "n", b"y", step=2)
    assert depth == ["t"] * 4
    found = [(record.artifact_type, record.step) for record in artifacts.read()]
    assert found == [("t", 1), *[("derived", 1)] * 2, ("t", 2), *[("derived", 2)] * 2]


def test_two_stores_whose_hooks_store_into_each_other_come_to_an_end(session):
    stores = []

    def into_the_other(store, record):
        other = stores[1 - stores.index(store)]
        other.store("derived", "n", record.sequence)

    stores += [quark.ArtifactStore(session, retention_hooks=[into_the_other]) for _ in range(2)]
    stores[0].store("t", "n", b"x")
    assert [record.artifact_type for record in stores[0].read()] == ["t", "derived", "derived"]


def test_a_hook_of_one_thread_does_not_silence_another(session):
    inside, go_on, called = threading.Event(), threading.Event(), []

    def wait_in_first(store, record):
        called.append(record.artifact_name)
        if record.artifact_name == "slow":
            inside.set()
            go_on.wait(30)

    artifacts = quark.ArtifactStore(session, retention_hooks=[wait_in_first])
    thread = threading.Thread(target=artifacts.store, args=("t", "slow", 1))
    thread.start()
    assert inside.wait(30)
    artifacts.store("t", "quick", 1)
    go_on.set()
    thread.join()
    assert called == ["slow", "quick"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("raises", [True, False])
def test_an_interrupt_in_a_hook_goes_through(session, error, raises):
    armed = [True]

    def interrupt(store, record):
        if armed.pop():
            armed.append(False)
            raise error

    artifacts = quark.ArtifactStore(
        session, retention_hooks=[interrupt], raise_on_retention_error=raises
    )
    with pytest.raises(error):
        artifacts.store("t", "n", b"x")
    # Hooks are called again afterwards.
    artifacts.store("t", "n", b"x")
    assert armed == []
    assert len(artifacts.read()) == 2


@pytest.mark.long
def test_a_hook_may_end_the_run(start, caplog):
    session = quark.start_run(project="p", storage_dir=start().context.storage_dir)

    def end(store, record):
        session.end_run()
        raise ValueError("after the end")

    artifacts = quark.ArtifactStore(session, retention_hooks=[end])
    record = artifacts.store("t", "n", b"x")
    with pytest.raises(quark.InvalidRunStateError):
        artifacts.store("t", "n", b"x")
    assert session.reload().status == "completed"
    assert artifacts.read() == (record,)
    assert artifacts.load(record) == b"x"


class Callable:
    def __call__(self, store, record):
        raise RuntimeError


def test_a_hook_needs_no_name(session):
    artifacts = quark.ArtifactStore(session, retention_hooks=[Callable()])
    artifacts.store("t", "n", 1)
    (event,) = list_events(session, "retention_hook_failed")
    assert event.payload["reason"] == "retention hook Callable raised RuntimeError"


@pytest.mark.parametrize(
    ("hooks", "named"),
    [
        ([None], r"retention_hooks\[0\]"),
        ([print, "print"], r"retention_hooks\[1\]"),
        (5, "retention_hooks"),
        (print, "retention_hooks"),
        ("print", "retention_hooks"),
    ],
)
def test_hooks_that_cannot_be_called_are_refused(session, hooks, named):
    with pytest.raises(quark.SchemaValidationError, match=named):
        quark.ArtifactStore(session, retention_hooks=hooks)


@pytest.mark.parametrize("raises", ["yes", 1, 0, "", []])
def test_raise_on_retention_error_is_a_bool(session, raises):
    with pytest.raises(quark.SchemaValidationError, match=r"^raise_on_retention_error"):
        quark.ArtifactStore(session, raise_on_retention_error=raises)
