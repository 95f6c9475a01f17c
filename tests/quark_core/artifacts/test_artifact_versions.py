"""Versions, aliases and lineage: by name within a project, whoever logs, and whatever goes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.programs import run_threads
from payload_tools import assert_clean, assert_whole, list_objects, list_scratch, run_script, sha256
from service_fixtures import serving

import quark
from quark_core.backends.edits import AliasEdit, RunEdit, check_edit
from quark_core.errors import ArtifactNotFoundError, InvalidRunStateError, SchemaValidationError
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.records.names import MAX_NAME_LENGTH, encode_name
from quark_core.records.query import Query
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


@pytest.mark.sampled
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
    with pytest.raises(
        ArtifactNotFoundError, match=r"no 'model:v3' in .*: its aliases are best, latest"
    ):
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
    (link,) = reader.read(user.run_id, ArtifactLinkRecord.KIND, Query()).to_records()
    reader.close()
    assert [version.name for version in made.made] == ["model:v0", "model:v1"]
    assert made.used == ()
    assert [(version.name, version.record.run_id) for version in took.used] == [
        ("model:v0", maker.run_id)
    ]
    assert (link.relation, link.version, link.step) == ("used", 0, 7)


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


@pytest.mark.sampled
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


PATHS = (*r".. . a/.. ../a a/../b a/./b ./a /a / //a a\b".split(), "\\", "a\0b")


@pytest.mark.parametrize("argument", ["name", "namespace"])
@pytest.mark.parametrize("store", ["artifacts", "strict_artifacts"])
def test_a_name_that_leads_elsewhere_is_refused(request, store, argument):
    artifacts = request.getfixturevalue(store)
    for name in PATHS:
        names = {"name": "n", "namespace": None} | {argument: name}
        with pytest.raises(quark.SchemaValidationError, match=f"^{argument}"):
            artifacts.store("t", payload="x", **names)
        with pytest.raises(quark.SchemaValidationError, match=f"^{argument}"):
            artifacts.log_histogram(bins=[0, 1], counts=[1], **names)
    assert artifacts.read() == ()
    assert not (artifacts._run.context.run_path / "artifacts").exists()


@pytest.mark.parametrize("name", ["", " ", "\t", 5, None, b"n", ["n"], "x" * 251, "ä" * 60])
def test_a_name_that_is_none_is_refused(artifacts, name):
    with pytest.raises(quark.SchemaValidationError, match=r"^name"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        artifacts.store("t", name, "x")
    if name is not None:
        with pytest.raises(quark.SchemaValidationError, match=r"^name"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            artifacts.store("t", "n", "x", namespace=name)
    assert artifacts.read() == ()


def test_name_and_namespace_share_one_bound(artifacts):
    key = "/".join(["n" * 124, "m" * 125])
    assert len(key) == MAX_NAME_LENGTH
    record = artifacts.store("t", "m" * 125, "x", namespace="n" * 124)
    assert record.artifact_key == key
    assert artifacts.load(record) == "x"
    assert artifacts.read(artifact_key=key) == (record,)
    with pytest.raises(quark.SchemaValidationError, match="251 characters"):
        artifacts.store("t", "m" * 126, "x", namespace="n" * 124)


def test_a_single_segment_may_be_as_long_as_a_key(artifacts, session):
    record = artifacts.store("t", "x" * MAX_NAME_LENGTH, "payload", step=1)
    assert (session.run_path / record.payload_relative_path).read_text() == "payload"
    assert (session.run_path / record.metadata_relative_path).is_file()


@pytest.mark.parametrize(
    "artifact_type",
    ["", ".", "..", "a/b", "a\\b", "a b", "ä", ".hidden", "-x", "x" * 101, "a\0", "a\n", 5, None],
)
def test_a_type_outside_its_rule_is_refused(artifacts, artifact_type, tmp_path):
    (tmp_path / "file").write_text("x")
    calls = {
        "artifact_type": [
            lambda: artifacts.store(artifact_type, "n", "x"),
            lambda: artifacts.store_file(artifact_type, "n", tmp_path / "file"),
            lambda: artifacts.log_file(tmp_path / "file", artifact_type=artifact_type),
        ],
        "snapshot_type": [lambda: artifacts.log_snapshot("n", 1, snapshot_type=artifact_type)],
    }
    for argument, stores in calls.items():
        for store in stores:
            with pytest.raises(quark.SchemaValidationError, match=f"^{argument}"):
                store()
    assert artifacts.read() == ()


@pytest.mark.parametrize("artifact_type", ["x" * 100, "A.b-c_9", "0", "con", "a.."])
def test_a_type_within_its_rule_is_taken(artifacts, session, artifact_type):
    record = artifacts.store(artifact_type, "n", "x")
    assert artifacts.read(artifact_type=artifact_type) == (record,)
    place = (session.run_path / record.payload_relative_path).resolve()
    assert place.is_relative_to(session.run_path / "artifacts")
    assert artifacts.load(record) == "x"


@pytest.mark.parametrize(
    "name", ["mean@1", "_x", ".x", "a//b", "a/", "a b/ü", "my model (1).pt", "\u2028", "\ud800"]
)
def test_a_name_outside_the_rule_is_stored_encoded(artifacts, name):
    with pytest.warns(RuntimeWarning, match="Both names can be read") as said:
        record = artifacts.store("t", name, "x")
    assert [warning.filename for warning in said] == [__file__]
    assert record.artifact_key == encode_name(name) != name
    assert artifacts.read(artifact_key=name) == (record,)
    assert artifacts.read(artifact_key=record.artifact_key) == (record,)
    assert artifacts.read(artifact_name=record.artifact_name) == (record,)
    namespace, _, last = name.rpartition("/")
    if last:
        assert artifacts.read(artifact_name=last) == (record,)
    if namespace.strip("/"):
        assert artifacts.read(namespace=namespace) == (record,)
        assert artifacts.read(namespace=record.namespace) == (record,)
    assert artifacts.load(record) == "x"


@pytest.mark.parametrize("name", ["mean@1", "a//b", "ü", "_x", "a/", "mean_x40_1"])
def test_a_strict_run_refuses_what_it_would_have_to_encode(strict_artifacts, name):
    with pytest.raises(quark.SchemaValidationError, match="naming rule"):
        strict_artifacts.store("t", name, "x")
    assert strict_artifacts.store("t", "plain/name", "x").artifact_key == "plain/name"
    assert len(strict_artifacts.read()) == 1


def test_a_name_that_looks_encoded_is_told_from_the_encoded_one(artifacts):
    with pytest.warns(RuntimeWarning):
        odd = artifacts.store("t", "mean@1", "odd")
    with pytest.warns(RuntimeWarning):
        look_alike = artifacts.store("t", "mean_x40_1", "look-alike")
    assert odd.artifact_key == "mean_x40_1"
    assert artifacts.read(artifact_key="mean@1") == (odd,)
    # One asks for its own name, the other for its stored one: neither is left out.
    assert artifacts.read(artifact_key="mean_x40_1") == (odd, look_alike)
    assert artifacts.read(artifact_key=look_alike.artifact_key) == (look_alike,)


TEXT = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(codec=None), max_size=8),
    st.text("./\\\0 ax_-~$\n", max_size=12),
    st.lists(st.sampled_from(["..", ".", "", "a", "x2e_", "_x2f_", "~", "C:", "\u2024."])).map(
        "/".join
    ),
    st.text("ab/", min_size=240, max_size=252),
)
ODD = st.one_of(TEXT, st.none(), st.integers(), st.binary(max_size=3))


@pytest.mark.long
@given(name=ODD, namespace=ODD, step=st.none() | st.integers(0, 2**63 - 1))
@example(name="..", namespace=None, step=None)
@example(name="x_", namespace="x_", step=0)
@example(name="a" * 250, namespace=None, step=2**63 - 1)
def test_any_text_is_refused_or_stays_inside(artifacts, session, name, namespace, step):
    root = (session.run_path / "artifacts").resolve()
    record, refusal = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            payload = {"of": repr(name)}
            record = artifacts.store("any.type", name, payload, namespace=namespace, step=step)
        except quark.SchemaValidationError as error:
            refusal = str(error)
    if record is None:
        assert refusal.startswith(("name", "namespace"))
        return
    for relative in (record.payload_relative_path, record.metadata_relative_path):
        assert ".." not in relative.split("/")
        place = session.run_path / relative
        assert place.resolve().is_relative_to(root)
        assert place.absolute().is_relative_to(root)
        assert place.is_file()
    original = name if namespace is None else f"{namespace}/{name}"
    assert record in artifacts.read(artifact_key=original)
    assert record in artifacts.read(artifact_key=record.artifact_key)
    assert artifacts.load(record) == {"of": repr(name).encode("utf-8", "replace").decode()}
    assert {path.name for path in session.run_path.iterdir()} <= {"artifacts", "journal"}
    assert {path.name for path in root.iterdir()} <= {".objects", ".partial", "any.type"}
    assert list_scratch(session) == []


def test_equal_payloads_cost_once(artifacts, session, tmp_path):
    data = os.urandom(300_000)
    path = tmp_path / "same.bin"
    path.write_bytes(data)
    records = [
        artifacts.store("a", "one", data, step=1),
        artifacts.store("b", "two", bytearray(data)),
        artifacts.store("c", "three", np.frombuffer(data, "u1"), payload_format="bytes"),
        artifacts.store_file("d", "four", path),
        artifacts.log_file(path),
        quark.ArtifactStore(session).store("a", "one", data, step=1),
    ]
    (place,) = list_objects(session).values()
    inodes = {(session.run_path / r.payload_relative_path).stat().st_ino for r in records}
    assert inodes == {place.stat().st_ino}
    files = [p for p in (session.run_path / "artifacts").rglob("*") if p.is_file()]
    own = [p.lstat().st_size for p in files if p.suffix != ".json"]
    assert sum(size for size in own if size > 1_000) == len(data)
    for record in records:
        assert_whole(artifacts, record, data)
    assert_clean(session)


def test_what_differs_in_one_bit_is_kept_twice(artifacts, session):
    for data in (b"\0" * 1_000, b"\0" * 999 + b"\1", b"\0" * 999):
        assert_whole(artifacts, artifacts.store("t", "n", data), data)
    assert len(list_objects(session)) == 3


def test_many_threads_at_once(artifacts, session):
    payloads = [os.urandom(size) for size in (1, 4_000, 200_000)]
    barrier = threading.Barrier(8)
    records = [[] for _ in range(8)]

    def work(index):
        barrier.wait()
        for turn in range(12):
            data = payloads[(index + turn) % 3]
            records[index].append((artifacts.store("t", f"w{index}", data, step=turn), data))

    run_threads(work, range(8))
    assert sorted(list_objects(session)) == sorted(map(sha256, payloads))
    for index, stored in enumerate(records):
        assert artifacts.read(artifact_key=f"w{index}") == tuple(record for record, _ in stored)
        for record, data in stored:
            assert artifacts.load(record) == data
    everything = artifacts.read()
    assert len({record.id for record in everything}) == 96
    assert len({record.payload_relative_path for record in everything}) == 96
    assert_clean(session)


def store_from_context(context, name, payloads):
    with quark.ArtifactStore(context) as artifacts:
        for step, data in enumerate(payloads):
            record = artifacts.store("t", name, data, step=step)
            assert artifacts.load(record) == data
            assert artifacts.load(record.id) == data


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn"])
def test_other_processes_store_through_the_context(session, artifacts, method):
    start = multiprocessing.get_context(method)
    payloads = [bytes([index]) * 100_000 for index in range(3)]
    mine = artifacts.store("t", "parent", payloads[0])
    workers = [
        start.Process(target=store_from_context, args=(session.context, f"w{n}", payloads))
        for n in range(2)
    ]
    for worker in workers:
        worker.start()
    for step, data in enumerate(payloads):
        artifacts.store("t", "parent", data, step=step)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    for index in range(2):
        found = artifacts.read(artifact_key=f"w{index}")
        assert [artifacts.load(record) for record in found] == payloads
    assert artifacts.load(mine) == payloads[0]
    assert sorted(list_objects(session)) == sorted(map(sha256, payloads))
    assert len({record.writer_id for record in artifacts.read()}) == 3
    assert_clean(session)


FORKS = """
def work(artifacts, name):
    for step in range(5):
        record = artifacts.store("t", name, bytes([step]) * 50_000, step=step)
        assert record.payload_relative_path.startswith("artifacts/t/")
        assert artifacts.load(record) == bytes([step]) * 50_000
    try:
        artifacts.load(record.id)
    except quark.SessionStoreError as error:
        assert "forked" in str(error)
    else:
        os._exit(9)
    artifacts.store_file("t", name, sys.argv[2], step=5)

if __name__ == "__main__":
    with quark.start_run(project="p", storage_dir=storage_dir) as session:
        artifacts = quark.ArtifactStore(session)
        first = artifacts.store("t", "parent", b"\\0" * 50_000)
        pid = os.fork()
        if pid == 0:
            work(artifacts, "raw")
            sys.exit(0)
        fork = multiprocessing.get_context("fork")
        workers = [fork.Process(target=work, args=(artifacts, f"w{i}")) for i in range(2)]
        for worker in workers:
            worker.start()
        work_here = [artifacts.store("t", "parent", bytes([n]) * 50_000) for n in range(5)]
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [artifacts.load(r) for r in work_here] == [bytes([n]) * 50_000 for n in range(5)]
    print(session.run_id)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_children_store_into_their_parents_run(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"file" * 1_000)
    warnings = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}
    run_id = run_script(tmp_path, FORKS, path, **warnings).split()[0]
    session = quark.open_run(run_id, tmp_path / "runs")
    artifacts = quark.ArtifactStore(session)
    expected = [bytes([step]) * 50_000 for step in range(5)]
    for name in ("w0", "w1", "raw"):
        found = artifacts.read(artifact_key=name)
        assert [record.step for record in found] == list(range(6))
        assert [artifacts.load(record) for record in found] == [*expected, path.read_bytes()]
    assert len(artifacts.read(artifact_key="parent")) == 6
    assert len({record.writer_id for record in artifacts.read()}) == 4
    assert len(list_objects(session)) == 6
    assert list(session.run_path.glob("journal/*")) == []
    assert_clean(session)


def test_what_is_changed_after_the_call_changes_nothing(artifacts):
    buffer, numbers = bytearray(b"before"), np.arange(4.0)
    listed, nested, metadata = [1, [2]], {"a": {"b": [1]}}, {"m": [1]}
    records = [
        artifacts.store("t", "n", buffer, metadata=metadata),
        artifacts.store("t", "n", memoryview(buffer)),
        artifacts.store("t", "n", numbers, payload_format="bytes"),
        artifacts.store("t", "n", listed),
        artifacts.store("t", "n", nested),
        artifacts.log_histogram("h", bins=numbers, counts=listed[:1] * 3),
        artifacts.log_table("h", {"a": numbers, "b": numbers}),
        artifacts.log_image("i", numbers.reshape(2, 2) / 4),
    ]
    before = [artifacts.load(record) for record in records]
    buffer[:] = b"behind"
    numbers[:] = -1
    listed[1].append(3)
    listed.clear()
    nested["a"]["b"] = None
    metadata["m"].append(2)
    assert [artifacts.load(record) for record in records] == before
    assert before[:2] == [b"before", b"before"]
    assert before[3:5] == [[1, [2]], {"a": {"b": [1]}}]
    assert records[0].metadata["m"] == [1]
    assert artifacts.read()[0].metadata["m"] == [1]


@pytest.mark.long
def test_a_buffer_that_is_altered_during_the_call_is_kept_under_its_own_hash(artifacts, session):
    buffer = bytearray(8 * 1024 * 1024)
    stop = threading.Event()

    def scribble():
        turn = 0
        while not stop.is_set():
            turn += 1
            for place in range(0, len(buffer), 65_536):
                buffer[place] = turn % 256

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        records = [artifacts.store("t", "n", buffer) for _ in range(4)]
    finally:
        stop.set()
        thread.join()
    for record in records:
        assert len(artifacts.load(record)) == len(buffer)  # which checks the hash
    assert_clean(session)
