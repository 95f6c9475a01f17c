"""Sessions whose runs go to a service: the whole life of a run, from any machine."""

import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from service_fixtures import serving

import quark
from quark_core.errors import (
    ArtifactNotFoundError,
    InvalidRunStateError,
    RunNotFoundError,
    SessionStoreError,
)


def train(folder, *, steps=20, **arguments):
    session = quark.start_run(project="p", storage_dir=folder, **arguments)
    with session, quark.MetricsLogger(session) as metrics:
        for step in range(steps):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
    return session


@pytest.mark.long
def test_a_run_goes_to_the_service_and_leaves_no_store_here(service, tmp_path):
    session = train(tmp_path / "vision", config={"lr": 0.1}, tags=["a"])
    assert session.status == "completed"
    assert session.run_path == f"{service.url}/v1/runs/{session.run_id}"
    assert session.context.store_root == f"{service.url}?store=*"
    assert session.context.db_path is None
    assert not list((tmp_path / "vision").rglob("*.db"))
    assert not list((tmp_path / "vision").rglob("journal/*"))
    assert service.key not in repr(session.to_dict()) + repr(session.context)
    assert service.key.encode() not in pickle.dumps(session.context)
    opened = quark.open_run(session.run_id, tmp_path / "vision")
    assert [r.step for r in quark.MetricsLogger(opened).read()] == list(range(20))
    assert opened.context.run.tags == ("a",)
    assert opened.to_dict()["run"]["run_path"] == session.run_path


def test_tags_and_reloading(service, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        assert session.add_tag("x").run.tags == ("x",)
        quark.add_tag("y")
        assert session.reload().run.tags == ("x", "y")
        assert session.to_dict()["run"]["tags"] == ["x", "y"]


def list_ids(root, **options):
    return {run.run_id for run in quark.search_runs(storage_dir=root, **options)}


@pytest.mark.long
def test_a_workspace_is_one_store_whatever_the_folder_is_called(service, tmp_path, monkeypatch):
    first = train(tmp_path / "one")
    second = train(tmp_path / "two")
    both = {first.run_id, second.run_id}
    for folder in ("one", "two", "of-a-colleague"):
        assert list_ids(tmp_path / folder) == both
    assert second.context.store_root == f"{service.url}?store=*"
    elsewhere = quark.open_run(first.run_id, tmp_path / "two")
    assert elsewhere.run_id == first.run_id
    compared = quark.ComparisonEngine(second).compare(elsewhere)
    assert {diff.verdict for diff in compared.metric_diffs} <= {"equivalent", None}
    monkeypatch.setenv("QUARK_STORE_NAME", "one")
    assert list_ids(tmp_path) == {first.run_id}
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", f"{service.url}?store=two")
    assert list_ids(tmp_path) == {second.run_id}
    third = train(tmp_path / "three")
    assert third.context.store_root == f"{service.url}?store=two"
    assert list_ids(tmp_path) == {second.run_id, third.run_id}
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", f"{service.url}?store=*")
    assert list_ids(tmp_path, project="p") == {*both, third.run_id}
    assert list_ids(tmp_path, where="train/loss < 0") == set()


@pytest.mark.long
def test_an_artifact_of_a_colleague_is_found_by_its_alias(service, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "hers") as session:
        quark.ArtifactStore(session).store("model", "model", b"weights", aliases=["best"])
    with quark.start_run(project="p", storage_dir=tmp_path / "his") as session:
        assert session.use_artifact("model:best").path.read_bytes() == b"weights"
        with pytest.raises(quark.ArtifactNotFoundError, match=r"in the store http.*\?store=\*"):
            session.use_artifact("absent:best")


@pytest.mark.long
def test_a_run_is_resumed_from_another_folder(service, tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path / "here")
    with quark.MetricsLogger(session) as metrics:
        metrics.log("m", 1.0, step=0)
        session.end_run("interrupted")
    resumed = quark.resume_run(run_id=session.run_id, storage_dir=tmp_path / "there")
    with resumed, quark.MetricsLogger(resumed) as metrics:
        metrics.log("m", 2.0, step=1)
        assert [record.value for record in metrics.read()] == [1.0, 2.0]
    assert resumed.context.run.resume_count == 1
    assert resumed.run_path == session.run_path
    assert (tmp_path / "there" / ".quark").is_dir()


@pytest.mark.long
def test_unknown_runs(service, tmp_path):
    with pytest.raises(RunNotFoundError):
        quark.open_run("absent", tmp_path)
    with pytest.raises(RunNotFoundError):
        quark.resume_run(run_id="absent", storage_dir=tmp_path)
    session = train(tmp_path)
    assert quark.open_run(session.run_id[:6], tmp_path).id == session.run_id
    with pytest.raises(RunNotFoundError, match=f"Similar IDs: {session.run_id}"):
        quark.open_run(f"{session.run_id[:8]}-", tmp_path)


@pytest.mark.long
def test_of_two_processes_that_resume_a_run_one_is_refused(service, tmp_path):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.end_run("interrupted")
    program = (
        "import sys, quark\n"
        "from pathlib import Path\n"
        "try:\n"
        "    s = quark.resume_run(run_id=sys.argv[1], storage_dir=sys.argv[2])\n"
        "except quark.InvalidRunStateError:\n"
        "    print('refused')\n"
        "else:\n"
        "    print('resumed', flush=True)\n"
        "    sys.stdin.read()\n"
        "    s.end_run('interrupted')\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, session.run_id, str(tmp_path / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    said = sorted(process.stdout.readline().strip() for process in processes)
    for process in processes:
        process.communicate(timeout=280)
    assert said == ["refused", "resumed"]
    assert all(process.returncode == 0 for process in processes)


@pytest.mark.long
def test_artifacts_both_ways(service, tmp_path):
    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    with quark.start_run(project="p", storage_dir=tmp_path / "runs") as session:
        artifacts = quark.ArtifactStore(session)
        record = artifacts.store("t", "a/b", {"x": 1}, step=1)
        file = artifacts.log_file(tmp_path / "big")
        empty = artifacts.store_file("t", "empty", _touch(tmp_path / "empty"))
    opened = quark.ArtifactStore(quark.open_run(session.run_id, tmp_path / "elsewhere"))
    assert opened.load(record.id) == {"x": 1}
    target = opened.load_file(file.id, tmp_path / "copy")
    assert target.read_bytes() == (tmp_path / "big").read_bytes()
    with opened.open(file.id) as stream:
        stream.seek(1_000_000)
        assert stream.read(10) == (tmp_path / "big").read_bytes()[1_000_000:1_000_010]
    with opened.open(empty.id) as stream:
        assert stream.read() == b""
    assert not list((tmp_path / "runs").rglob("artifacts/.objects/*/*"))
    with pytest.raises(ArtifactNotFoundError):
        session.open_run.reader.open_payload(session.run_id, "0" * 64)


def _touch(path):
    path.touch()
    return path


@pytest.mark.long
def test_reads_in_parts_and_curves(service, tmp_path):
    session = train(tmp_path, steps=1000)
    metrics = quark.MetricsLogger(session)
    parts = list(metrics.iterate(rows=300))
    assert max(part.count for part in parts) <= 300
    assert sum(part.count for part in parts) == 1000
    curve = metrics.series("train/loss", max_points=10)
    assert (len(curve), curve.points) == (10, 1000)
    np.testing.assert_allclose(curve.high[0], 1.0)
    assert metrics.columns(step_min=990).count == 10


@pytest.mark.long
def test_analysis_is_kept(service, tmp_path):
    session = train(tmp_path, steps=300)
    result = quark.AnalyzerEngine(session).analyze()
    opened = quark.open_run(session.run_id, tmp_path)
    scores = quark.AnalyzerEngine(opened).read_health_scores()
    assert [s.score for s in scores] == [s.score for s in result.health_scores]
    quark.AnalyzerEngine(opened).analyze(store=True)
    quark.PhaseAnalyzer(opened).analyze(store=True)


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_log_to_the_run(service, tmp_path, method):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        quark.MetricsLogger(session) as metrics,
    ):
        metrics.log("m", 0.0, step=0)
        metrics.flush()
        context = multiprocessing.get_context(method)
        process = context.Process(target=_work, args=(session.context,))
        process.start()
        process.join(250)
        assert process.exitcode == 0
        metrics.log("m", 2.0, step=2)
    found = quark.MetricsLogger(quark.open_run(session.run_id, tmp_path)).read()
    assert sorted(record.value for record in found) == [0.0, 1.0, 2.0]


def _work(context):
    with quark.MetricsLogger(context) as metrics:
        metrics.log("m", 1.0, step=1)


@pytest.mark.long
def test_the_backend_is_told_by_its_uri(service, tmp_path, monkeypatch):
    url = service.url
    monkeypatch.delenv("QUARK_PERSISTENCE_URL")
    for number, text in enumerate((url, f"quark+{url}", f"service:{url}?timeout=9", f"{url}/")):
        folder = tmp_path / str(number)
        session = train(folder, backends=text)
        opened = quark.open_run(session.run_id, folder, backend=text)
        assert len(quark.MetricsLogger(opened).read()) == 20
        assert not list(folder.rglob("*.db"))
    monkeypatch.setenv("QUARK_PERSISTENCE_URL", url)
    train(tmp_path / "more", backends="service")


@pytest.mark.long
def test_a_mirror_beside_the_service(service, tmp_path):
    session = train(tmp_path, backends=f"csv:{tmp_path / 'mirror'}")
    assert list((tmp_path / "mirror").rglob("metrics.csv"))
    assert all(lane.delivered for lane in session.report_delivery().lanes)


def test_a_run_that_is_alive_cannot_be_resumed(service, tmp_path):
    with (
        quark.start_run(project="p", storage_dir=tmp_path) as session,
        pytest.raises(InvalidRunStateError, match="running in this process"),
    ):
        quark.resume_run(run_id=session.run_id, storage_dir=tmp_path)


@pytest.mark.long
def test_a_key_that_may_only_ingest_is_enough_for_a_training(tmp_path, monkeypatch):
    with serving(tmp_path / "server") as server:
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("ci", "ingest"))
        with (
            quark.TrainingSession.start_run(project="p", storage_dir=tmp_path / "a") as session,
            quark.MetricsLogger(session) as metrics,
        ):
            metrics.log("loss", 0.5, step=1)
            with pytest.raises(SessionStoreError, match="scope"):
                metrics.read()
        monkeypatch.setenv("QUARK_USER_KEY", server.make_key("ci", "read"))
        opened = quark.open_run(session.run_id, tmp_path / "b")
        assert opened.context.run.status == "completed"
        assert [record.value for record in quark.MetricsLogger(opened).read()] == [0.5]


@pytest.mark.long
def test_what_is_not_found_says_which_store_was_asked(service, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from quark.cli.main import cli

    train(tmp_path / "vision")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert "completed" in CliRunner().invoke(cli, ["runs"]).output
    everything, named = f"the store {service.url}?store=*", f"the store {service.url}?store=empty"
    with pytest.raises(RunNotFoundError, match="no run matches 'absent'") as caught:
        CliRunner().invoke(cli, ["show", "absent"], catch_exceptions=False)
    assert everything in str(caught.value)
    with pytest.raises(RunNotFoundError) as caught:
        quark.open_run("absent")
    assert str(caught.value).startswith(f"run_id absent: {everything} has no run with this ID")
    monkeypatch.setenv("QUARK_STORE_NAME", "empty")
    output = CliRunner().invoke(cli, ["runs"]).output
    assert f"No matching runs in {named}." in " ".join(output.split())
    assert "Only the project store 'empty' of the server was searched" in output
