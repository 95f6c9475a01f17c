"""Stores that are removed or read-only, answers that take too long, every backend that reads."""

import asyncio
import os
import shutil
import sqlite3
import threading
import time
import warnings
from pathlib import Path

import httpx
import pytest
from page_client import log_plain_run, wait_for_analysis

import quark
import quark.page.app as application
from quark.page.routes.page_source import open_source
from quark_core.errors import SessionStoreError

DEADLINE_S = 60
STORES = Path(__file__).parents[2] / "assets" / "stores"


def test_a_place_without_a_store_is_refused(tmp_path):
    with pytest.raises(SessionStoreError, match=r"no Quark store"):
        open_source(tmp_path)


def test_a_store_that_is_removed_meanwhile(tmp_path, look):
    run_id = log_plain_run(tmp_path)
    client = look(tmp_path)
    wait_for_analysis(client, run_id)
    shutil.rmtree(tmp_path / ".quark")
    for path in ("/api/runs", f"/api/runs/{run_id}", f"/api/runs/{run_id}/series?key=train/loss"):
        answer = client.http.get(path)
        assert answer.status_code == 503, answer.text
        assert "is missing" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
    assert client.http.get("/").status_code == 200


def test_a_run_that_is_removed_meanwhile(tmp_path, look):
    run_id, other = log_plain_run(tmp_path), log_plain_run(tmp_path)
    client = look(tmp_path)
    cursor = client.json(f"/api/runs/{run_id}")["cursor"]
    from click.testing import CliRunner

    from quark.cli.main import cli

    done = CliRunner().invoke(cli, ["rm", run_id, "-d", str(tmp_path), "--yes"])
    assert done.exit_code == 0, done.output
    for tail in ("", "/series?key=train/loss", f"/changes?cursor={cursor}&key=train/loss"):
        assert client.http.get(f"/api/runs/{run_id}{tail}").status_code == 404
    end = time.monotonic() + DEADLINE_S
    while [row["id"] for row in client.json("/api/runs")["rows"]] != [other]:
        assert time.monotonic() < end
    assert client.json("/api/standings", run=[run_id, other])["standings"].keys() == {other}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_on_a_medium_that_cannot_be_written(tmp_path, look):
    run_id = log_plain_run(tmp_path)
    paths = [tmp_path, *tmp_path.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        client = look(tmp_path)
        assert client.json("/api/runs")["count"] == 1
        assert client.curves(run_id, "train/loss")[1]["train/loss"][0]["points"] == 50
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_store_of_an_older_version(tmp_path, look):
    shutil.copytree(STORES / "5" / "store", tmp_path / ".quark")
    client = look(tmp_path)
    rows = client.json("/api/runs")["rows"]
    assert rows
    for row in rows:
        found = client.json(f"/api/runs/{row['id']}")
        keys = [metric[0] for metric in found["metrics"]["rows"]][:5]
        if keys:
            assert {c["key"] for c in client.pack(
                f"/api/runs/{row['id']}/series", key=keys)[0]["curves"]} == set(keys)  # fmt: skip


def test_looking_changes_no_run(tmp_path, look):
    run_id = log_plain_run(tmp_path)

    def read_rows():
        with sqlite3.connect(tmp_path / ".quark" / "quark.db") as database:
            return [
                database.execute(f"SELECT count(*), max(rowid) FROM {table}").fetchone()
                for table in ("run", "batch", "generation", "output", "metric_summary")
                if database.execute(
                    "SELECT 1 FROM sqlite_master WHERE name = ?", (table,)
                ).fetchone()
            ]

    before = read_rows()
    client = look(tmp_path)
    client.json(f"/api/runs/{run_id}")
    wait_for_analysis(client, run_id)
    client.curves(run_id, "train/loss")
    assert read_rows() == before


def test_hostile_names_come_as_they_were_given(tmp_path, look):
    hostile = '<script>alert("x")</script>'
    session = quark.start_run(
        project=hostile,
        storage_dir=tmp_path,
        name=hostile,
        notes=hostile,
        tags=[hostile],
        config={hostile: hostile, "__proto__": {"constructor": 1}},
    )
    with session, quark.MetricsLogger(session) as metrics, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of names that are encoded
        metrics.log(hostile, 1.0, step=0)
        metrics.log("__proto__", 1.0, step=0)
    client = look(tmp_path)
    run = client.json(f"/api/runs/{session.run_id}")
    assert run["run"]["project"] == run["run"]["name"] == run["run"]["notes"] == hostile
    assert run["run"]["tags"] == [hostile]
    assert run["config"] == {hostile: hostile, "__proto__": {"constructor": 1}}
    names = {row[1] for row in run["metrics"]["rows"]}
    assert {hostile, "__proto__"} <= names
    _, curves = client.curves(session.run_id, hostile, "__proto__")
    assert [curve[0]["name"] for curve in curves.values()] == [hostile, "__proto__"]
    about = client.get("/api/about")
    assert about.headers["content-type"] == "application/json"


class SlowReader:
    """A backend whose runs are there only once somebody opens the gate."""

    def __init__(self, reader):
        self._reader = reader
        self.gate = threading.Event()
        self.asked = 0

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def summarize(self, run_id):
        self.asked += 1
        self.gate.wait(DEADLINE_S)
        return self._reader.summarize(run_id)


def ask_twice(client, paths, between, later):
    """Several requests of one session at once, and more of them once `between` is true."""

    async def ask():
        transport = httpx.ASGITransport(app=client.http.app)
        cookies = dict(client.http.cookies)
        url = "http://127.0.0.1:7410"
        async with httpx.AsyncClient(transport=transport, base_url=url, cookies=cookies) as http:
            answers = await asyncio.gather(*(http.get(path) for path in paths))
            end = time.monotonic() + DEADLINE_S
            while not between():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            return answers + await asyncio.gather(*(http.get(path) for path in later))

    return asyncio.run(ask())


def test_an_answer_that_takes_too_long_is_503_and_the_next_ones_wait(plain, monkeypatch):
    monkeypatch.setattr(application, "_ANSWER_S", 0.2)
    monkeypatch.setattr(application, "_WAIT_S", 0.4)
    slow = SlowReader(plain.source.reader)
    plain.source.reader = slow
    path = f"/api/runs/{plain.run_id}/series?key=train/loss"
    answers = ask_twice(plain, [path] * 4, lambda: slow.asked == 4, [path] * 3)
    slow.gate.set()
    assert [answer.status_code for answer in answers] == [503] * 7
    assert slow.asked == 4  # the others did not even begin
    for answer in answers:
        assert int(answer.headers["retry-after"]) > 0
        assert "again" in answer.json()["error"]["message"]


def test_a_mistake_of_a_backend_s_is_500_and_told_to_the_terminal(plain, caplog):
    class Broken:
        def list_runs(self, **_):
            raise ZeroDivisionError

        read = load_run = list_runs

    plain.source.reader = Broken()
    answer = plain.get("/api/runs")
    assert answer.status_code == 500
    assert "ZeroDivision" not in answer.text
    assert "ZeroDivisionError" in caplog.text


def check_whole_page(client, *, has_artifacts=True):
    """What every backend that reads must show, with or without capabilities."""
    about = client.json("/api/about")
    assert [project["runs"] for project in about["projects"]] == [1]
    page = client.json("/api/runs", column=["train/loss", "config.lr"])
    (row,) = page["rows"]
    run_id = row["id"]
    standing = client.json("/api/standings", run=run_id, column=["train/loss", "config.lr"])
    standing = standing["standings"][run_id]
    assert standing["values"][0] == pytest.approx(1 / 50)
    assert float(standing["values"][1]) == 0.1
    assert standing["main"]["name"] == "train/loss"
    run = client.json(f"/api/runs/{run_id}")
    assert run["run"]["state"] == "completed"
    names = {metric[1] for metric in run["metrics"]["rows"]}
    assert {"train/loss", "val/acc@1"} <= names
    _, curves = client.curves(run_id, "train/loss", "val/acc@1")
    assert sum(curve["points"] for its in curves.values() for curve in its) == 100
    for its in curves.values():
        assert its[0]["step"].tolist() == list(range(50))
    _, some = client.curves(run_id, "train/loss", low=10, high=19, entries=5)
    assert sum(curve["points"] for curve in some["train/loss"]) == 10
    cursor = client.curves(run_id, "train/loss")[0]["cursor"]
    path = f"/api/runs/{run_id}/changes"
    assert client.get(path, cursor=cursor, key="train/loss").status_code in (200, 204)
    assert client.pack("/api/sparks", run=run_id)[0]["curves"]
    analysis = wait_for_analysis(client, run_id)
    assert analysis["state"] == "computed", analysis["note"]
    assert analysis["scores"][0]["key"] == "overall"
    head, _ = client.pack(f"/api/runs/{run_id}/grid", field="norm", summary="gradient")
    assert head["rows"] == []
    assert client.json(f"/api/runs/{run_id}/events")["events"] is not None
    found = client.json(f"/api/runs/{run_id}/artifacts")["artifacts"]
    if has_artifacts:
        assert [each["name"] for each in found] == ["note"]
    assert client.http.get("/api/runs/nope").status_code == 404
    assert {metric["name"] for metric in client.json("/api/names")["metrics"]} >= {"train/loss"}
    live = client.json("/api/runs", where="train/loss < 0.5")
    assert live["count"] == 1
    return about, run


def log_whole_run(folder, **arguments):
    session = quark.start_run(project="p", storage_dir=folder, config={"lr": 0.1}, **arguments)
    with session, quark.MetricsLogger(session) as metrics, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for step in range(50):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
            metrics.log("val/acc@1", step / 50, step=step)
        quark.ArtifactStore(session).store("note", "note", "text")
    return session.run_id


def test_the_embedded_store(tmp_path, look):
    log_whole_run(tmp_path)
    about, run = check_whole_page(look(tmp_path))
    assert about["notes"] == []
    assert run["run"]["attempt"] == 0


def test_a_store_that_is_journals_alone(tmp_path, look, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    log_whole_run(tmp_path)
    check_whole_page(look(tmp_path))


def test_csv_files(tmp_path, look):
    place = f"csv:{tmp_path / 'out'}"
    log_whole_run(tmp_path, backends=place)
    about, _ = check_whole_page(look(tmp_path, place), has_artifacts=False)
    assert about["backend"] == "csv"
    assert any("every point" in note for note in about["notes"])
    assert about["capabilities"]["outputs"] is False


@pytest.mark.long
def test_a_service(service, tmp_path, look):
    log_whole_run(tmp_path / "vision")
    about, _ = check_whole_page(look(tmp_path / "vision"))
    assert about["place"].startswith(service.url)
    assert service.key not in about["place"]


@pytest.mark.long
def test_a_tracking_server_of_mlflow(tmp_path, look, mlflow_server):
    backend = f"mlflow+{mlflow_server.uri}"
    log_whole_run(tmp_path, backends=backend)
    check_whole_page(look(tmp_path, backend), has_artifacts=False)


@pytest.fixture
def service(tmp_path, monkeypatch):
    from service_fixtures import serving

    with serving(tmp_path / "server") as server:
        server.key = server.make_key("default")
        monkeypatch.setenv("QUARK_PERSISTENCE_URL", server.url)
        monkeypatch.setenv("QUARK_USER_KEY", server.key)
        yield server


@pytest.fixture
def mlflow_server(tmp_path):
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "quark_backends" / "mlflow"))
    pytest.importorskip("mlflow")
    import importlib.util

    place = Path(__file__).parents[2] / "quark_backends" / "mlflow" / "conftest.py"
    spec = importlib.util.spec_from_file_location("mlflow_conftest", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = module.MlflowServer(folder)
    server.start()
    yield server
    server.kill()
