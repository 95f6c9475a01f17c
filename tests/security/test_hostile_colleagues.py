"""What a colleague stores in a service makes no file elsewhere on anybody's machine."""

import hashlib
import os
import sqlite3
from contextlib import closing

import pytest
from hostile_folders import list_tree, make_artifact, make_journal
from hypothesis import given
from hypothesis import strategies as st
from kit.programs import call
from service_fixtures import ask, encode_ingest, serving

import quark
from quark_backends.mlflow.artifacts import name_payload
from quark_backends.service.protocol import MSGPACK
from quark_backends.service.server import ingest_validation
from quark_core.artifacts.payload_folder import OutputFolder, make_file_name
from quark_core.delivery.journal_folder import LaneEntry
from quark_core.errors import SchemaValidationError
from quark_core.records.names import split_path
from quark_core.records.schema import validate_record
from quark_core.runs import recovery
from quark_core.testing.fakes import BatchMaker

DATA = b"ssh-ed25519 the attacker's key"
HOSTILE = [
    {"artifact_type": "/abs"},
    {"artifact_type": "../.."},
    {"artifact_type": ".git", "artifact_key": "hooks/pre-commit"},
    {"artifact_type": "a\\..\\.."},
    {"artifact_key": "../../../x"},
    {"artifact_key": "/etc/cron.d/x"},
    {"artifact_key": "a//b"},
    {"artifact_key": "C:/Windows/x"},
    {"artifact_key": "a\\b"},
    {"artifact_key": "nul\0"},
    {"artifact_key": "esc\x1b[2Jbell\x07"},
    {"artifact_key": "k" * 250, "artifact_type": "t" * 101},
    {"payload_relative_path": "/home/user/.ssh/authorized_keys"},
    {"payload_relative_path": "../../../.ssh/authorized_keys"},
    {"payload_relative_path": "artifacts/../../../.bashrc"},
    {"payload_relative_path": "artifacts/file/" + "n" * 300},
    {"metadata_relative_path": "../../../../x.json"},
    {"metadata_relative_path": "/tmp/x.json"},
    {"sha256": "../../../../etc/passwd"},
    {"sha256": "A" * 64},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def colleague(server, monkeypatch):
    """A service that this user trusts, and a key of the same workspace in other hands."""
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
    monkeypatch.setenv("QUARK_USER_KEY", server.make_key("default"))
    with server.client("default", "ingest", "read") as client:
        yield client


def send(client, run_id, *batches):
    return client.post(
        f"/v1/runs/{run_id}/batches",
        content=encode_ingest(*batches),
        headers={"Content-Type": MSGPACK},
    )


@pytest.mark.sampled
@pytest.mark.parametrize("said", HOSTILE)
def test_no_border_takes_an_artifact_that_names_files_elsewhere(colleague, said):
    maker = BatchMaker(f"theirs-{hashlib.sha256(str(said).encode()).hexdigest()[:8]}")
    assert send(colleague, maker.run_id, maker.start()).status_code == 200
    batch = make_artifact(maker, DATA, **said)
    with pytest.raises(SchemaValidationError, match="ArtifactRecord"):
        validate_record(batch.to_records()[0])
    reply = send(colleague, maker.run_id, batch)
    assert reply.status_code == 422, reply.text
    assert ask(colleague, "read", run_id=maker.run_id, kind="artifact", query={}) == []


def test_what_is_refused_is_what_leads_elsewhere_and_nothing_more(colleague):
    maker = BatchMaker("ours")
    assert send(colleague, "ours", maker.start()).status_code == 200
    for said in (
        {"artifact_type": "aux", "artifact_key": "losses/aux.weights"},
        {"artifact_key": "损失/top 5 %"},
        {"payload_relative_path": None},
        {"payload_relative_path": f"artifacts/.objects/ab/{'ab' * 32}"},
        {"artifact_key": "k" * 250},
    ):
        batch = make_artifact(maker, DATA, **said)
        validate_record(batch.to_records()[0])
        assert send(colleague, "ours", batch).status_code == 200


@pytest.mark.sampled
@pytest.mark.parametrize("said", HOSTILE)
def test_older_stores_are_read_and_written_out_below_the_folder_only(
    server, colleague, monkeypatch, tmp_path, said
):
    """As a service has them that took such records once."""
    monkeypatch.setattr(ingest_validation, "check_body", lambda _body: None)
    maker = BatchMaker(f"old-{hashlib.sha256(str(said).encode()).hexdigest()[:8]}")
    sha256 = hashlib.sha256(DATA).hexdigest()
    assert send(colleague, maker.run_id, maker.start()).status_code == 200
    put = colleague.put(f"/v1/runs/{maker.run_id}/payloads/{sha256}", content=DATA)
    assert put.status_code in (200, 201, 204), put.text
    assert send(colleague, maker.run_id, make_artifact(maker, DATA, **said)).status_code == 200
    home = tmp_path / "home"
    (home / "here").mkdir(parents=True)
    monkeypatch.chdir(home / "here")
    listed = call("artifacts", maker.run_id, "--json")
    assert listed.exit_code == 0
    call("artifacts", maker.run_id, "--output", "out")
    written = [name for name, data in list_tree(home).items() if data == DATA]
    expected = 0 if "sha256" in said else 1
    assert len(written) == expected
    for name in written:
        assert name.startswith("here/out/")
        assert not any(part.startswith(".") for part in name.split("/"))
    assert not os.path.lexists("/abs")


@pytest.mark.sampled
@pytest.mark.parametrize("place", ["csv:{out}", "csv:?publish={out}"])
@pytest.mark.parametrize("said", HOSTILE)
def test_no_mirror_makes_files_elsewhere(tmp_path, monkeypatch, said, place):
    home, root = tmp_path / "home", tmp_path / "home" / "root"
    place = place.format(out=home / "out")
    maker = BatchMaker("theirs")
    table = b'{"columns": ["a"], "rows": [[1]]}'
    batches = [
        maker.start(),
        make_artifact(maker, table, **{"artifact_type": "table", "payload_format": "json", **said}),
    ]
    folder = make_journal(root, run_id="theirs", lanes=(LaneEntry("csv", place),), batches=batches)
    sha256 = hashlib.sha256(table).hexdigest()
    payload = folder.path / "artifacts" / ".objects" / sha256[:2] / sha256
    payload.parent.mkdir(parents=True)
    payload.write_bytes(table)
    call("sync", root, "--allow-backend", place)
    outside = {name.split("/")[0] for name in list_tree(home)}
    assert outside <= {"root", "out"}
    assert set(os.listdir(tmp_path)) == {"home"}


@pytest.mark.parametrize("said", HOSTILE)
def test_a_name_in_mlflow_leads_nowhere_else(said):
    (record,) = make_artifact(BatchMaker("theirs"), DATA, **said).to_records()
    if "sha256" not in said:
        assert split_path(name_payload(record)) is not None


@given(st.text())
def test_any_text_makes_one_harmless_file_name(text):
    name = make_file_name(text)
    assert name == os.path.basename(name)
    assert name.isprintable()
    assert name
    assert not name.startswith((".", "-"))
    assert not name.endswith((".", " "))
    assert not set(name) & set('<>:"/\\|?*')
    assert len(name.encode("utf-8", "replace")) <= 255
    assert name.partition(".")[0].lower() not in ("con", "nul", "aux", "com1", "lpt9")


@given(st.text(), st.text())
def test_names_stay_apart(first, second):
    assert (make_file_name(first) == make_file_name(second)) == (first == second)


@pytest.mark.parametrize("depth", [0, 1])
def test_no_link_below_the_output_folder_is_followed(tmp_path, depth):
    victim = tmp_path / "victim"
    (victim / "b").mkdir(parents=True)
    (victim / "b" / "file").write_text("years of work")
    out = tmp_path / "out"
    out.mkdir()
    if depth == 0:
        os.symlink(victim, out / "a")
    else:
        (out / "a").mkdir()
        os.symlink(victim / "b", out / "a" / "b")
    before = list_tree(victim)
    folder = OutputFolder(out)
    with pytest.raises(OSError), folder.write(("a", "b", "new")) as file:  # noqa: PT011 - either
        file.write(b"x")
    with pytest.raises(OSError):  # noqa: PT011 - either
        folder.open(("a", "b", "file"))
    assert list_tree(victim) == before


def test_a_link_in_place_of_a_file_is_left_alone(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    out = tmp_path / "out"
    out.mkdir()
    os.symlink(victim, out / "file")
    with pytest.raises(FileExistsError), OutputFolder(out).write(("file",)) as file:
        file.write(b"x")
    assert victim.read_text() == "years of work"
    assert os.listdir(out) == ["file"]


def test_without_folder_descriptors_links_are_not_followed_either(tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.setattr("quark_core.artifacts.payload_folder._HAS_DESCRIPTORS", False)
    folder = OutputFolder(tmp_path / "out")
    with folder.write(("a", "b", "file")) as file:
        file.write(b"x")
    with folder.open(("a", "b", "file")) as found:
        assert found.read() == b"x"
    with pytest.raises(FileExistsError), folder.write(("a", "b", "file")) as file:
        file.write(b"y")
    os.symlink(tmp_path, tmp_path / "out" / "link")
    with pytest.raises(NotADirectoryError), folder.write(("link", "file")) as file:
        file.write(b"z")
    assert not (tmp_path / "file").exists()


def test_an_export_of_a_run_with_a_hostile_id_asks_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with quark.start_run(project="own", storage_dir=tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    recovery.sync(tmp_path)
    with closing(sqlite3.connect(tmp_path / ".quark" / "quark.db")) as database:
        database.execute("UPDATE run SET id = '../elsewhere'")
        database.commit()
    with pytest.raises(SchemaValidationError, match="run_id"):
        call("export", "../elsewhere", "--format", "csv", "-d", tmp_path)
    assert not (tmp_path.parent / "elsewhere").exists()
