"""`quark du` says where the bytes are, and its sums are those of `du`."""

import json
import os

import pytest

import quark
from quark.cli.du import shorten_ids
from quark_core.backends.contract import Capability
from quark_core.backends.registry import default_registry


def measure(invoke, root):
    return json.loads(invoke("du", "--json", "-d", root).stdout)


def check_sums(usage):
    runs = usage["runs"]
    data = sum(run["database_bytes"] for run in runs)
    files = sum(run["file_bytes"] for run in runs) - usage["elsewhere_bytes"]
    assert data + usage["free_bytes"] + usage["overhead_bytes"] == usage["database_file_bytes"]
    assert usage["database_file_bytes"] + files + usage["shared_bytes"] == usage["total_bytes"]
    for run in runs:
        assert run["total_bytes"] == run["database_bytes"] + run["file_bytes"]
        assert run["file_bytes"] == sum(run["files"].values())


@pytest.mark.long
def test_the_sums_are_those_of_du(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "small", "text", points=100)
    make_run(tmp_path, "large", points=20_000, backends="csv")
    make_run(tmp_path, "trashed", points=500)
    invoke("rm", "trashed", "-y", "-d", tmp_path)
    usage = measure(invoke, tmp_path)
    check_sums(usage)
    assert usage["total_bytes"] == store.size_bytes()
    assert [run["run_id"] for run in usage["runs"]] == ["large", "trashed", "small"]
    large, trashed, small = usage["runs"]
    assert (large["points"], trashed["points"], small["points"]) == (40_000, 1000, 200)
    # Random numbers of 64 bits do not compress much, and there are two a step.
    assert large["database_bytes"] > 20_000 * 2 * 6
    assert large["files"]["csv"] > 20_000 * 2 * 20
    assert trashed["trashed_at"] is not None
    assert usage["trash_bytes"] == trashed["total_bytes"]
    assert [(p["project"], p["runs"], p["points"]) for p in usage["projects"]] == [
        ("vision", 1, 40_000),
        ("text", 1, 200),
    ]
    # What is overhead is a small part of a store with anything in it.
    assert 0 <= usage["overhead_bytes"] < usage["database_file_bytes"]


def test_compaction_changes_no_count_of_points(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "run", points=3000)
    rows = store.query(
        "SELECT sum(count) FROM (SELECT count FROM batch WHERE kind = 'metric'"
        " UNION ALL SELECT count FROM chunk WHERE kind = 'metric')"
    )
    (run,) = measure(invoke, tmp_path)["runs"]
    assert run["points"] == rows[0][0] == 6000


def test_files_are_told_apart_by_what_they_are(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "run", points=1)
    folder = store.folder / "runs" / "run"
    for name, size in (("artifacts", 9000), ("quarantine", 100)):
        (folder / name).mkdir(parents=True)
        (folder / name / "x").write_bytes(os.urandom(size))
    (folder / "loose").write_bytes(b"x")
    os.link(folder / "artifacts" / "x", folder / "artifacts" / "same file")
    (folder / "artifacts" / "link").symlink_to(tmp_path)
    (store.folder / "stranger").write_bytes(b"x" * 5000)
    usage = measure(invoke, tmp_path)
    check_sums(usage)
    assert usage["total_bytes"] == store.size_bytes()
    (run,) = usage["runs"]
    assert set(run["files"]) == {"artifacts", "other", "quarantine"}
    assert run["files"]["artifacts"] > run["files"]["quarantine"] > 0
    assert usage["shared_bytes"] >= 5000


@pytest.mark.long
def test_journals_elsewhere_are_counted_and_named(tmp_path, monkeypatch, start, invoke, store):
    monkeypatch.setenv("QUARK_JOURNAL_DIR", str(tmp_path / "journals"))
    session = start(tmp_path, "run")
    quark.MetricsLogger(session).log("loss", 1.0, step=0)
    session.flush("stored")
    usage = measure(invoke, tmp_path)
    check_sums(usage)
    assert usage["elsewhere_bytes"] > 0
    assert usage["runs"][0]["files"]["journal"] == usage["elsewhere_bytes"]
    assert usage["total_bytes"] == store.size_bytes()
    assert "journals elsewhere" in invoke("du", "-d", tmp_path).stdout
    session.end_run()


@pytest.mark.long
def test_a_store_without_runs(tmp_path, make_run, invoke, store):
    make_run(tmp_path, "run", points=1)
    invoke("rm", "run", "-y", "-d", tmp_path)
    invoke("gc", "-y", "-d", tmp_path)
    usage = measure(invoke, tmp_path)
    check_sums(usage)
    assert usage["runs"] == usage["projects"] == []
    assert usage["total_bytes"] == store.size_bytes()
    assert "0 runs" in invoke("du", "-d", tmp_path).stdout


@pytest.mark.long
def test_the_table_has_projects_runs_and_totals(tmp_path, make_run, invoke):
    make_run(tmp_path, "run-a", "p" * 70, name="[red]a[/]", points=2000)
    make_run(tmp_path, "run-b", "other", points=10)
    make_run(tmp_path, "run-c", "other", points=10)
    invoke("rm", "run-c", "-y", "-d", tmp_path)
    result = invoke("du", "-d", tmp_path, columns=80)
    lines = result.stdout.splitlines()
    assert max(map(len, [line for line in lines if str(tmp_path) not in line])) <= 80
    text = " ".join(result.stdout.split())
    for words in ("2 runs", "1 in the trash", "database overhead", "total", "in trash"):
        assert words in text
    wide = invoke("du", "-d", tmp_path, columns=200).stdout
    rows = [line.split() for line in wide.splitlines()]
    assert ["run-a", "[red]a[/]", "p" * 70, "completed", "4,000"] in [row[:5] for row in rows]
    order = [row[0] for row in rows if row and row[0].startswith("run-")]
    assert order == ["run-a", "run-c", "run-b"] or order == ["run-a", "run-b", "run-c"]
    assert "1 of 3 runs, the largest." in invoke("du", "-n", "1", "-d", tmp_path).stdout
    assert "run-a" not in invoke("du", "-n", "0", "-d", tmp_path).stdout


def test_shortened_ids_still_fit_one_run():
    known = ["0123456789a", "0123456789b", "01234567", "zz"]
    assert shorten_ids(["0123456789a", "zz"], known) == ["0123456789a", "zz"]
    assert shorten_ids(["abcdefghijk"], ["abcdefghijk", "abcdefgh-other"]) == ["abcdefghi"]
    assert shorten_ids(["abcdefghijk"], []) == ["abcdefgh"]


def test_the_capability_is_declared():
    assert Capability.REMOVAL in default_registry().find("embedded").capabilities
