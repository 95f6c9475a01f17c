"""`quark artifacts` and what `quark show` says beside metrics."""

import hashlib
import json
from pathlib import Path

import pytest

import quark


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
    assert f"They lie in {Path(storage_dir, '.quark', 'runs', 'r1', 'artifacts')}" in result.output
    assert "3 artifacts, 1.2 kB" in result.output


def test_a_key_or_a_type_chooses(storage_dir, invoke):
    by_key = json.loads(invoke("artifacts", "r1", "scores", "-d", storage_dir, "--json").output)
    assert [record["artifact_type"] for record in by_key] == ["table"]
    by_type = json.loads(
        invoke("artifacts", "r1", "-t", "blob", "-d", storage_dir, "--json").output
    )
    assert [record["step"] for record in by_type] == [3, 4]
    nothing = invoke("artifacts", "r1", "absent", "-d", storage_dir)
    assert (nothing.exit_code, nothing.output) == (0, "No artifacts fit.\n")


def test_payloads_are_copied_out_whole_and_none_is_overwritten(storage_dir, invoke, tmp_path):
    output = tmp_path / "out"
    arguments = ("artifacts", "r1", "-t", "blob", "-d", storage_dir, "-o", output)
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert f"2 of 2 payloads are in {output}" in result.output
    copies = sorted((output / "blob" / "weights" / "first").iterdir())
    assert [copy.read_bytes() for copy in copies] == [b"\x00\x01" * 600, b"\x02"]
    copies[0].write_bytes(b"mine")
    again = invoke(*arguments)
    assert "exists and is left alone" in again.output
    assert copies[0].read_bytes() == b"mine"


def test_a_damaged_payload_is_told_and_not_copied(storage_dir, invoke, tmp_path):
    digest = hashlib.sha256(b"\x02").hexdigest()
    (damaged,) = Path(storage_dir).glob(f".quark/runs/r1/artifacts/.objects/*/{digest}")
    damaged.chmod(0o600)
    damaged.write_bytes(b"\x03")
    result = invoke("artifacts", "r1", "-t", "blob", "-d", storage_dir, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "is damaged" in result.output
    assert "1 of 2 payloads" in result.output


def test_a_run_without_artifacts_says_so(tmp_path, start, invoke):
    start(tmp_path, "empty").end_run()
    assert invoke("artifacts", "empty", "-d", tmp_path).output == "This run has no artifacts.\n"


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
