"""`quark artifacts` and what `quark show` says beside metrics."""

import hashlib
import json
from pathlib import Path

import pytest

import quark
from quark_core.errors import ArtifactNotFoundError


@pytest.fixture
def storage_dir(tmp_path, start):
    session = start(tmp_path, "r1")
    with quark.ArtifactStore(session) as store:
        store.store("blob", "weights/first", b"\x00\x01" * 600, step=3)
        store.store("blob", "weights/first", b"\x02", step=4)
        store.log_table("scores", [[1, 2]], columns=["a", "b"], epoch=2)
    session.end_run()
    return tmp_path


def test_artifacts_are_listed_with_size_and_file(storage_dir, invoke):
    result = invoke("artifacts", "r1", "-d", storage_dir)
    assert result.exit_code == 0
    assert "weights/first" in result.output
    assert "1.2 kB" in result.output
    assert f"Stored in {Path(storage_dir, '.quark', 'runs', 'r1', 'artifacts')}" in result.output
    assert "3 artifacts, 1.2 kB" in result.output


def test_a_key_or_a_type_chooses(storage_dir, invoke):
    by_key = json.loads(invoke("artifacts", "r1", "scores", "-d", storage_dir, "--json").output)
    assert [record["artifact_type"] for record in by_key] == ["table"]
    by_type = json.loads(
        invoke("artifacts", "r1", "--type", "blob", "-d", storage_dir, "--json").output
    )
    assert [record["step"] for record in by_type] == [3, 4]
    nothing = invoke("artifacts", "r1", "absent", "-d", storage_dir)
    assert (nothing.exit_code, nothing.output) == (
        0,
        f"Run r1 of the store {storage_dir} has no matching artifacts.\n",
    )


def test_payloads_are_copied_out_whole_and_none_is_overwritten(storage_dir, invoke, tmp_path):
    output = tmp_path / "out"
    arguments = ("artifacts", "r1", "--type", "blob", "-d", storage_dir, "-o", output)
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert f"Copied 2 of 2 files to {output}." in result.output
    copies = sorted((output / "blob" / "weights" / "first").iterdir())
    assert [copy.read_bytes() for copy in copies] == [b"\x00\x01" * 600, b"\x02"]
    copies[0].write_bytes(b"mine")
    again = invoke(*arguments)
    assert "already exists and was not changed" in again.output
    assert copies[0].read_bytes() == b"mine"


def test_a_damaged_payload_is_told_and_not_copied(storage_dir, invoke, tmp_path):
    digest = hashlib.sha256(b"\x02").hexdigest()
    (damaged,) = Path(storage_dir).glob(f".quark/runs/r1/artifacts/.objects/*/{digest}")
    damaged.chmod(0o600)
    damaged.write_bytes(b"\x03")
    result = invoke("artifacts", "r1", "--type", "blob", "-d", storage_dir, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "is damaged" in result.output
    assert "Copied 1 of 2 files" in result.output


def test_a_run_without_artifacts_says_so(tmp_path, start, invoke):
    start(tmp_path, "empty").end_run()
    told = invoke("artifacts", "empty", "-d", tmp_path).output
    assert told == f"Run empty of the store {tmp_path} has no artifacts.\n"


def test_a_mirror_without_records_of_artifacts_says_that_it_may_have_files(tmp_path, start, invoke):
    start(tmp_path, "empty", backends=f"csv:{tmp_path / 'csv'}").end_run()
    told = invoke("artifacts", "empty", "-d", tmp_path, "-b", f"csv:{tmp_path / 'csv'}").output
    assert "has no artifacts.\nA mirror may store files without records" in told


@pytest.mark.long
def test_show_lists_the_newest_artifacts(storage_dir, invoke):
    shown = invoke("show", "r1", "-d", storage_dir).output
    assert "weights/first" in shown
    as_json = json.loads(invoke("show", "r1", "-d", storage_dir, "--json").output)
    assert [record["artifact_key"] for record in as_json["artifacts"]] == [
        "weights/first",
        "weights/first",
        "scores",
    ]
    assert as_json["telemetry"] is None


def test_gc_removes_what_a_killed_process_had_begun(storage_dir, invoke):
    import os
    import time

    partial = storage_dir / ".quark" / "runs" / "r1" / "artifacts" / ".partial"
    old, new = partial / "1-old", partial / "1-new"
    for path in (old, new):
        path.write_bytes(b"half")
    long_ago_s = time.time() - 7200
    os.utime(old, (long_ago_s, long_ago_s))
    assert invoke("gc", "-d", storage_dir, "--yes").exit_code == 0
    assert (old.exists(), new.exists()) == (False, True)


@pytest.fixture
def versioned(tmp_path, start):
    """A run that has made versions, one that has used some, and files of a directory."""
    maker, user = start(tmp_path, "maker"), start(tmp_path, "user")
    folder = tmp_path / "files"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "one.txt").write_text("one")
    with quark.ArtifactStore(maker) as store:
        store.store("model", "model", b"first", aliases=["best"])
        store.store("model", "model", b"second")
        store.log_directory(folder, name="data").wait(60)
    user.use_artifact("model:best")
    maker.end_run()
    user.end_run()
    return tmp_path


def test_versions_are_listed_with_aliases_and_users(versioned, invoke):
    found = json.loads(invoke("artifacts", "versions", "model", "-d", versioned, "--json").output)
    assert [(each["name"], each["aliases"], each["used_by"]) for each in found] == [
        ("model:v0", ["best"], ["user"]),
        ("model:v1", ["latest"], []),
    ]
    shown = invoke("artifacts", "versions", "-d", versioned).output
    assert "data:v0" in shown
    assert "one.txt" not in shown
    with pytest.raises(
        ArtifactNotFoundError, match=r"no artifact 'absent' in .*\. Artifacts: 'data', 'model'\."
    ):
        invoke("artifacts", "versions", "absent", "-d", versioned)


def test_an_alias_is_moved_and_taken_away(versioned, invoke):
    said = invoke("artifacts", "alias", "model:v1", "best", "-d", versioned)
    assert (said.exit_code, said.output) == (0, "Set the alias 'best' of model:v1.\n")
    shown = json.loads(
        invoke("artifacts", "lineage", "model:best", "-d", versioned, "--json").output
    )
    assert (shown["name"], shown["aliases"]) == ("model:v1", ["best", "latest"])
    said = invoke("artifacts", "alias", "model:v1", "best", "--remove", "-d", versioned)
    assert said.output == "Removed the alias 'best' of model:v1.\n"
    with pytest.raises(
        quark.ArtifactNotFoundError, match="its aliases are latest, and its versions v0, v1"
    ):
        invoke("artifacts", "get", "model:best", "-d", versioned)
    with pytest.raises(quark.SchemaValidationError, match="must not be 'v7'"):
        invoke("artifacts", "alias", "model:v1", "v7", "-d", versioned)


def test_a_version_is_copied_out_and_nothing_replaced(versioned, tmp_path, invoke):
    out = tmp_path / "out"
    said = invoke("artifacts", "get", "model:v0", "-o", out, "-d", versioned)
    assert said.exit_code == 0
    assert (out / "model").read_bytes() == b"first"
    with pytest.raises(quark.SchemaValidationError, match="not replaced"):
        invoke("artifacts", "get", "model:v1", "-o", out, "-d", versioned)
    assert (out / "model").read_bytes() == b"first"
    assert invoke("artifacts", "get", "data", "-o", out / "d", "-d", versioned).exit_code == 0
    assert (out / "d" / "deep" / "one.txt").read_text() == "one"
    assert invoke("artifacts", "get", "data", "-o", out / "d", "-d", versioned).exit_code == 1


def test_lineage_of_a_run_is_told_both_ways(versioned, invoke):
    told = json.loads(invoke("artifacts", "lineage", "user", "-d", versioned, "--json").output)
    assert [each["name"] for each in told["used"]] == ["model:v0"]
    shown = invoke("artifacts", "lineage", "maker", "-d", versioned).output
    assert "Used by this run: none" in shown
    assert "model:v0" in shown
    assert "user" in shown


def test_parts_of_others_are_not_listed_unless_asked_for(versioned, invoke):
    assert "directory_file" not in invoke("artifacts", "maker", "-d", versioned).output
    parts = invoke("artifacts", "list", "maker", "--type", "directory_file", "-d", versioned)
    assert "one.txt" in parts.output


def test_of_several_projects_one_must_be_named(versioned, start, invoke):
    start(versioned, "other", project="q").end_run()
    with pytest.raises(quark.QuarkError, match="--project"):
        invoke("artifacts", "versions", "-d", versioned)
    assert "model:v0" in invoke("artifacts", "versions", "-p", "vision", "-d", versioned).output


def test_removing_a_run_says_what_others_use_of_it(versioned, invoke):
    result = invoke("rm", "maker", "-d", versioned, "--yes")
    assert "model:v0 is used by user." in result.output
    told = json.loads(invoke("artifacts", "lineage", "user", "-d", versioned, "--json").output)
    assert told["gone"] == ["model:v0 of run maker"]
