"""Versions, aliases and lineage: by name within a project, whoever logs, and whatever goes."""

import pytest
from service_fixtures import serving

import quark
from quark_core.backends.edits import AliasEdit, RunEdit, check_edit
from quark_core.errors import ArtifactNotFoundError, InvalidRunStateError, SchemaValidationError
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.runs import artifact_versions
from quark_core.runs.artifact_versions import list_lineage, list_versions
from quark_core.runs.backend_choice import open_reader
from quark_core.runs.run_editing import open_editor


@pytest.fixture(params=["embedded", "journal", "service"])
def place(request, tmp_path, monkeypatch):
    """Where runs are kept."""
    if request.param == "journal":
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    if request.param != "service":
        yield request.param
        return
    with serving(tmp_path / "server") as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default", "ingest", "read", "write"))
        yield request.param


@pytest.fixture
def begin(place, tmp_path):
    """Starts runs of one project in one place."""
    sessions = []

    def start(name=None, project="p"):
        sessions.append(quark.start_run(project=project, storage_dir=tmp_path, name=name))
        return sessions[-1]

    yield start
    for session in sessions:
        if session.status == "running":
            session.end_run()


def log(session, payload, name="model", **arguments):
    with quark.ArtifactStore(session) as artifacts:
        return artifacts.store("model", name, payload, **arguments)


def tell(tmp_path, project="p"):
    reader = open_reader(tmp_path)
    try:
        return {version.name: (set(version.aliases), version.used_by)
                for version in list_versions(reader, project)}  # fmt: skip
    finally:
        reader.close()


def test_versions_are_counted_through_the_runs_of_a_project(begin, tmp_path):
    first, second = begin("one"), begin("two")
    log(first, b"a")
    log(second, b"b", aliases=["best"])
    log(second, b"b")  # the same in a row is no version
    log(first, b"a")
    log(begin(project="other"), b"z")
    user = begin("user")
    for name, payload in (
        ("model", b"a"), ("model:latest", b"a"), ("model:v0", b"a"), ("model:v1", b"b"),
        ("model:best", b"b"), ("model:v2", b"a"),
    ):  # fmt: skip
        assert user.use_artifact(name).read() == payload, name
    assert user.use_artifact("model", project="other").read() == b"z"
    with pytest.raises(ArtifactNotFoundError, match=r"no 'model:v3' in .*: there is best, latest"):
        user.use_artifact("model:v3")
    with pytest.raises(ArtifactNotFoundError, match="no artifact 'modle'"):
        user.use_artifact("modle:best")


def test_an_alias_moves_and_lineage_is_read_both_ways(begin, tmp_path):
    maker, user = begin("maker"), begin("user")
    old = log(maker, b"a", aliases=["best", "prod"])
    with quark.ArtifactStore(maker) as artifacts:
        new = artifacts.store("model", "model", b"b")
        used = user.use_artifact("model:best", step=7)
        artifacts.set_alias(new, "best")
        with pytest.raises(SchemaValidationError, match="alias"):
            artifacts.set_alias(new, "v1")
        with pytest.raises(ArtifactNotFoundError):
            artifacts.set_alias("absent", "best")
    assert used.record == old
    assert used.version.aliases == ("best", "prod")
    maker.end_run()
    user.end_run()
    assert tell(tmp_path) == {
        "model:v0": ({"prod"}, (user.run_id,)),
        "model:v1": ({"best", "latest"}, ()),
    }
    reader = open_reader(tmp_path)
    made, took = list_lineage(reader, maker.run_id), list_lineage(reader, user.run_id)
    (link,) = reader.read(user.run_id, ArtifactLinkRecord.KIND, quark_query()).to_records()
    reader.close()
    assert [version.name for version in made.made] == ["model:v0", "model:v1"]
    assert made.used == ()
    assert [(version.name, version.record.run_id) for version in took.used] == [
        ("model:v0", maker.run_id)
    ]
    assert (link.relation, link.version, link.step) == ("used", 0, 7)


def quark_query():
    from quark_core.records.query import Query

    return Query()


def test_an_alias_is_set_and_taken_away_after_the_end(begin, tmp_path):
    maker = begin()
    record = log(maker, b"a")
    maker.end_run()

    def edit(**changes):
        alias = AliasEdit(
            artifact_key="model", artifact_id=record.id, sha256=record.sha256, version=0,
            alias="prod", **changes,
        )  # fmt: skip
        with open_editor(tmp_path, maker.run_id, "aliases") as editor:
            editor.edit_run(maker.run_id, check_edit(RunEdit(alias=alias)), by="anna@box")

    edit()
    assert tell(tmp_path)["model:v0"][0] == {"latest", "prod"}
    (event,) = quark.EventLogger(quark.open_run(maker.run_id, tmp_path)).read(
        event_type="run_edited"
    )
    said = event.payload["message"]
    assert said.startswith("anna@box")
    assert said.endswith(": alias 'prod' names model:v0")
    edit(removed=True)
    assert tell(tmp_path)["model:v0"][0] == {"latest"}


def test_a_number_that_was_used_stays_when_an_earlier_run_goes(begin, tmp_path, monkeypatch):
    gone, kept, user = begin("gone"), begin("kept"), begin("user")
    log(gone, b"a")
    log(kept, b"b")
    log(gone, b"c")
    log(kept, b"d")
    user.use_artifact("model:v0")
    assert user.use_artifact("model:v3").read() == b"d"
    for session in (gone, kept, user):
        session.end_run()
    reader = open_reader(tmp_path)
    found = [stored for stored in reader.list_runs() if stored.run.id != gone.run_id]
    monkeypatch.setattr(type(reader), "list_runs", lambda *_, **__: found)
    versions = list_versions(reader, "p")
    lineage = list_lineage(reader, user.run_id)
    reader.close()
    assert [version.number for version in versions] == [1, 3]
    assert [version.name for version in lineage.used] == ["model:v3"]
    assert lineage.gone == (f"model:v0 of run {gone.run_id}",)


@pytest.mark.parametrize(
    "name", ["", ":best", "model:", "model:a b", 3, None, "x" * 2000, "model:-x"]
)
def test_what_names_no_version_is_refused(session, name):
    with pytest.raises((SchemaValidationError, ArtifactNotFoundError)):
        session.use_artifact(name)


def test_a_run_that_has_ended_uses_nothing(session):
    log(session, b"a")
    session.end_run()
    with pytest.raises(InvalidRunStateError, match="use_artifact"):
        session.use_artifact("model")


def test_a_run_of_which_nothing_is_kept_says_so(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        assert quark.ArtifactStore(session).store("t", "a", b"x", aliases=["best"]) is not None
        with pytest.raises(ArtifactNotFoundError):
            session.use_artifact("a")


def test_what_is_used_has_a_path_a_value_and_copies(session, tmp_path):
    with quark.ArtifactStore(session) as artifacts:
        artifacts.store("config", "settings", {"lr": 0.1})
        path = tmp_path / "weights.pt"
        path.write_bytes(b"w" * 1000)
        artifacts.log_file(path, artifact_type="model", aliases=["best"])
    assert session.use_artifact("settings").load() == {"lr": 0.1}
    used = session.use_artifact("weights.pt:best")
    assert used.path.read_bytes() == b"w" * 1000
    assert used.copy_to(tmp_path / "out") == tmp_path / "out" / "weights.pt"
    with pytest.raises(SchemaValidationError, match="not replaced"):
        used.copy_to(tmp_path / "out")
    with used.open() as file:
        assert file.read(3) == b"www"
    assert repr(used) == "UsedArtifact('weights.pt:v0', 1000 bytes)"


def test_links_that_are_none_are_refused(session):
    from quark_core.records.base import start_fields

    good = ("alias", "m", "r", "w-artifact-0", "a" * 64, 0, "best")
    session.write([ArtifactLinkRecord(*start_fields(None), *good)])
    for place, value in ((0, "owns"), (1, ""), (4, "x"), (5, -1), (6, None)):
        bad = [*good[:place], value, *good[place + 1 :]]
        with pytest.raises(SchemaValidationError):
            session.write([ArtifactLinkRecord(*start_fields(None), *bad)])


def test_an_alias_that_moves_while_it_is_read_is_where_it_was_or_is(begin, tmp_path, monkeypatch):
    training, other = begin("training"), begin("other")
    log(training, b"a", aliases=["best"])
    training.flush("stored")
    read = artifact_versions._read
    steps = iter(b"bcdefgh")
    moments = []

    def read_while_it_moves(reader, run_id, kind, query):
        found = read(reader, run_id, kind, query)
        if run_id == training.run_id:
            moments.append(kind)
            log(training, bytes([next(steps)]), aliases=["best"])
            training.flush("stored")
        return found

    monkeypatch.setattr(artifact_versions, "_read", read_while_it_moves)
    found = other.use_artifact("model:best")
    monkeypatch.undo()
    assert found.name in {f"model:v{number}" for number in range(len(moments) + 1)}
    assert set(moments) == {"artifact", "artifact_link"}
