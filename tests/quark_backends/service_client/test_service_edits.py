"""Runs of a service are edited and asked to stop, by who has a key with the scope."""

import pytest
from click.testing import CliRunner
from service_fixtures import error_of, ingest

import quark
from quark.cli.main import cli
from quark_core.backends.contract import Batch
from quark_core.errors import (
    InvalidRunStateError,
    RunNotFoundError,
    StoreUnauthorizedError,
    StoreUnavailableError,
)
from quark_core.records import EventRecord, LifecycleRecord
from quark_core.records.codec import encode_records
from quark_core.records.json_object import JsonObject
from quark_core.runs.open_run import StopLookout

MOMENT_US = 1_767_225_600_000_000


def make_origin(session):
    """Where a record comes from that no training of this session has made."""
    return session.run_id, "edit-0", 0, 0, 0, MOMENT_US


def make_change(session, action, data):
    """A lifecycle record that changes a run."""
    return LifecycleRecord(*make_origin(session), action, JsonObject(data))


def make_event(session, event_type, payload):
    """An event that tells of a change."""
    told = (None, None, None, JsonObject(payload))
    return EventRecord(*make_origin(session), event_type, "info", *told)


def make_batches(*records):
    """A batch of each record."""
    return [
        Batch(record.run_id, "edit-0", 0, 0, number, record.KIND, 1, encode_records([record]))
        for number, record in enumerate(records)
    ]


def beat(session):
    lookout = StopLookout(session.open_run)
    lookout.look()
    if lookout._thread is not None:  # the session's own has not heard of it before
        lookout._thread.join()


def test_a_run_of_a_service_is_edited(service, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, name="a", tags=["x"]) as session:
        run = quark.edit_run(session, name="b", add_tags=["y"], remove_tags=["x"])
        assert (run.name, run.tags) == ("b", ("y",))
    run = quark.edit_run(session.run_id, notes="n", archived=True, storage_dir=tmp_path)
    assert (run.name, run.notes, run.status) == ("b", "n", "completed")
    assert quark.search_runs(storage_dir=tmp_path) == ()
    (found,) = quark.search_runs(storage_dir=tmp_path, archived=True)
    assert found.stored.run == run
    events = quark.EventLogger(quark.open_run(session.run_id, tmp_path)).read()
    edits = [event.payload for event in events if event.event_type == "run_edited"]
    assert edits[0]["changes"]["name"] == {"before": "a", "after": "b"}
    key_id = service.key.split("_")[1]
    assert all(edit["by"].endswith(f"(key {key_id})") for edit in edits)


def test_a_training_that_logs_to_a_service_is_asked_to_stop(service, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        beat(session)
        assert session.stop_requested is None
        request = quark.stop_run(session, reason="enough")
        assert quark.stop_run(session, reason="again") == request
        beat(session)
        assert session.stop_requested == request
    stored = quark.open_run(session.run_id, tmp_path).open_run.reader.load_run(session.run_id)
    assert stored.stop.seen_at is not None
    with pytest.raises(InvalidRunStateError, match="has ended"):
        quark.stop_run(session)


def test_a_training_learns_of_it_with_a_key_that_only_writes_records(
    service, tmp_path, monkeypatch
):
    monkeypatch.setenv("QUARK_USER_KEY", service.make_key("default", "ingest"))
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        monkeypatch.setenv("QUARK_USER_KEY", service.key)
        request = quark.stop_run(session.run_id, storage_dir=tmp_path)
        monkeypatch.setenv("QUARK_USER_KEY", service.make_key("default", "ingest"))
        beat(session)
        assert session.stop_requested == request


@pytest.mark.parametrize("scopes", [("read",), ("ingest",), ("read", "ingest")])
def test_a_key_without_the_scope_neither_edits_nor_stops(service, tmp_path, monkeypatch, scopes):
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        session.flush()
        monkeypatch.setenv("QUARK_USER_KEY", service.make_key("default", *scopes))
        with pytest.raises(StoreUnauthorizedError, match="write"):
            quark.edit_run(session.run_id, name="b", storage_dir=tmp_path)
        with pytest.raises(StoreUnauthorizedError, match="write"):
            quark.stop_run(session.run_id, storage_dir=tmp_path)
        monkeypatch.setenv("QUARK_USER_KEY", service.key)
        assert session.reload().run.name == "a"
        beat(session)
        assert session.stop_requested is None


@pytest.mark.parametrize(
    ("action", "data"),
    [
        ("edit", {"by": "x@y", "changes": {"name": {"before": None, "after": "b"}}}),
        ("stop", {"id": "i", "by": "x@y", "reason": None}),
    ],
)
def test_no_edit_comes_in_among_the_batches_of_a_training(service, tmp_path, action, data):
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        session.flush()
        (batch,) = make_batches(make_change(session, action, data))
        with service.client("default", "ingest", "read") as client:
            refused = ingest(client, batch)
        assert refused.status_code == 403
        assert "require the scope 'write'" in error_of(refused)["message"]
        # Nor by who may edit, without the event that tells of it: an edit leaves a trace.
        with service.client("default", "ingest", "write") as client:
            assert ingest(client, batch).status_code == 403
        assert quark.open_run(session.run_id, storage_dir=tmp_path).context.run.name == "a"


FORGED = {
    "edit": {"by": "anna@desk (key KEY)", "changes": {"name": {"before": "a", "after": "b"}}},
    "stop": {"by": "anna@desk (key KEY)", "reason": "enough"},
}


@pytest.mark.parametrize("event_type", ["run_edited", "stop_requested"])
@pytest.mark.parametrize("way", ["batches", "logs"])
def test_no_training_makes_up_what_others_have_done(service, tmp_path, event_type, way):
    """An event of an edit says who has changed a run, and by which key."""
    said = FORGED["edit" if event_type == "run_edited" else "stop"]
    said = {**said, "by": said["by"].replace("KEY", service.key.split("_")[1])}
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        session.flush()
        (batch,) = make_batches(make_event(session, event_type, said))
        for scopes in (("ingest",), ("ingest", "write")):
            with service.client("default", *scopes) as client:
                if way == "batches":
                    refused = ingest(client, batch)
                else:
                    log = {"message": "x", "event_type": event_type, "payload": said}
                    refused = client.post(f"/v1/runs/{session.run_id}/logs", json=log)
                assert refused.status_code == 403, refused.text
        # Who runs the service replays what another store has.
        with service.client("default", "admin") as client:
            assert ingest(client, batch).status_code == 200


def test_an_edit_that_an_import_brings_has_its_event_with_it(service, tmp_path):
    changes = {"name": {"before": "a", "after": "b"}}
    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        session.flush()
        said = {"by": "import", "changes": changes}
        batches = make_batches(
            make_change(session, "edit", said), make_event(session, "run_edited", said)
        )
        with service.client("default", "ingest", "write") as client:
            assert ingest(client, *batches).status_code == 200
        assert quark.open_run(session.run_id, storage_dir=tmp_path).context.run.name == "b"


def test_an_event_that_tells_another_reason_tells_of_nothing(service, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.flush()
        said = {"by": "import", "changes": {}}
        batches = make_batches(
            make_change(session, "stop", {**said, "id": "s", "reason": "it diverges"}),
            make_event(session, "stop_requested", {**said, "reason": "it is done"}),
        )
        with service.client("default", "ingest", "write") as client:
            assert ingest(client, *batches).status_code == 403


def test_what_is_not_there_or_not_reached_is_told(service, tmp_path):
    with pytest.raises(RunNotFoundError):
        quark.edit_run("absent", name="b", storage_dir=tmp_path)
    with pytest.raises(RunNotFoundError):
        quark.stop_run("absent", storage_dir=tmp_path)
    service.stop()
    with pytest.raises(StoreUnavailableError):
        quark.edit_run("absent", name="b", storage_dir=tmp_path)
    service.stop = lambda: None  # it is over


def test_commands_reach_the_service(service, tmp_path):
    def invoke(*arguments, status=0):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, [*map(str, arguments)])
        assert result.exit_code == status, result.output + repr(result.exception)
        return result.output

    with quark.start_run(project="p", storage_dir=tmp_path, name="a") as session:
        session.flush()
        invoke("edit", "a", "-d", tmp_path, "--name", "b", "--archive")
        said = invoke("stop", "b", "-d", tmp_path, "--reason", "enough", "--wait", "0")
        assert ": enough." in said
    assert "(archived)" in invoke("runs", "-d", tmp_path, "--archived")
    assert "asked the run to stop" in " ".join(invoke("show", "b", "-d", tmp_path).split())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("action", "data"),
    [
        ("edit", {"by": "x@y", "changes": {"name": "b"}}),
        ("edit", {"by": "x@y", "changes": {"tags": {"added": "b", "removed": []}}}),
        ("stop", {"id": 7, "by": "x@y", "reason": None}),
        ("stop_seen", {}),
    ],
)
def test_no_malformed_edit_is_stored(service, tmp_path, action, data):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        session.flush()
        (batch,) = make_batches(make_change(session, action, data))
        with service.client("default") as client:
            assert ingest(client, batch).status_code == 422
