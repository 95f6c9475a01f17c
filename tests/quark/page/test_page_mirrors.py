"""The whole page over a mirror: what it keeps is there, and what it lacks is said."""

import shutil

import pytest
from everything_runs import STEPS, log_everything, read_all
from page_client import log_plain_run

import quark
from quark.page.routes.page_source import PageSource

RUN, OTHER = "whole-0", "whole-1"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """Two whole runs and a plain one in CSV files, and in no store."""
    root = tmp_path_factory.mktemp("mirror")
    backends = f"csv:{root / 'csv'}"
    log_everything(root, RUN, lr=0.1, backends=backends)
    log_everything(root, OTHER, lr=0.2, seed=1, backends=backends)
    return root, backends, log_plain_run(root, backends=backends)


@pytest.fixture
def client(mirror, look):
    return look(mirror[0], mirror[1])


def test_all_of_a_mirrored_run_is_there(client, mirror):
    found = read_all(client, RUN, OTHER)
    assert set(found["listed"]) == {RUN, OTHER, mirror[2]}
    assert found["about"]["capabilities"]["series"] is False
    assert "this backend reads every point of a curve" in found["about"]["notes"]
    assert found["run"]["config"]["model"] == {"width": 8}
    assert [len(curves[0]["step"]) for curves in found["curves"].values()] == [STEPS] * 2
    assert found["analysis"]["state"] == "computed"
    assert (
        found["analysis"]["note"] == "analyzed for this page, because csv does not store analyses"
    )
    assert (found["batches"]["batch_count"], len(found["system"]["ranks"])) == (40, 1)
    assert [row["name"] for row in found["layers"]["rows"]] == ["blocks.0"]
    assert "half way" in [event["message"] for event in found["events"]]
    assert found["tables"]["scores"]["count"] == 300
    assert [side["name"] for side in found["sides"]["sides"]] == [RUN, OTHER]
    assert found["verdict"]["state"] == "computed"
    # Nobody goes on with a run from there, nor knows from there where else it went.
    assert found["run"]["run"]["resume"] is None
    assert list(found["run"]["absent"]) == [
        "parameter",
        "parameter_distribution",
        "sample",
        "console",
        "delivery",
    ]


def test_what_a_mirror_has_nothing_of_is_said(client, mirror):
    run = client.json(f"/api/runs/{mirror[2]}")
    assert {kind for kind, count in run["contents"].items() if not count} <= set(run["absent"])
    assert run["absent"]["batch"].startswith("csv has no data of this run.")
    assert "csv:" in run["absent"]["delivery"]


def test_of_a_store_of_our_own_nothing_is_absent(plain):
    run = plain.json(f"/api/runs/{plain.run_id}")
    assert run["absent"] == {}
    assert run["run"]["resume"] is not None


def test_a_report_of_a_mirrored_run_says_no_less(client):
    from quark.page.report import compose_report
    from quark.page.report_contents import ReportOptions

    runs = [(client.source, RUN), (client.source, OTHER)]
    made = compose_report(runs, ReportOptions()).to_dict()
    assert (
        made["runs"][0]["analysis"]["note"]
        == "analyzed for this page, because csv does not store analyses"
    )
    assert len(made["comparisons"]) == 1


def test_what_has_ended_is_not_read_over_and_over(client, monkeypatch):
    """Else of many runs that each take their time the last is never there in time."""
    reads = []
    read = type(client.source.reader).read

    def count(self, run_id, kind, query):
        reads.append(kind)
        return read(self, run_id, kind, query)

    monkeypatch.setattr(type(client.source.reader), "read", count)
    moments = iter(range(0, 50_000, 5))
    monkeypatch.setattr("quark.page.routes.page_source.time.monotonic", lambda: next(moments))
    client.source.summarize(RUN)
    first = reads.count("metric")
    client.source.summarize(RUN)
    assert (first > 0, reads.count("metric")) == (True, first)


@pytest.mark.long
def test_of_what_would_be_sent_as_a_whole_only_a_few_are_looked_at(tmp_path, look, monkeypatch):
    """Records of earlier versions do not say what their payloads are."""
    monkeypatch.setattr(
        "quark_core.writers.artifact_writing._note_media", lambda metadata, *_: metadata
    )
    backends = f"csv:{tmp_path / 'csv'}"
    known = {}
    for place in (None, backends):
        session = quark.start_run(project="p", storage_dir=tmp_path, backends=place)
        with session, quark.ArtifactStore(session) as artifacts:
            for number in range(30):
                artifacts.store("note", f"n{number}", f"text {number}")
        client = look(tmp_path, place)
        path = f"/api/runs/{session.run_id}/artifacts"
        rows = client.json(path, limit=200)["artifacts"]
        known[place] = [row["media_type"] for row in rows].count("text/plain")
        assert len(rows) == 30
    assert known == {None: 30, backends: 20}


def test_a_mirror_that_is_gone_is_told(tmp_path, look):
    backends = f"csv:{tmp_path / 'csv'}"
    run_id = log_plain_run(tmp_path, backends=backends)
    client = look(tmp_path, backends)
    assert isinstance(client.source, PageSource)
    shutil.rmtree(tmp_path / "csv")
    answer = client.get(f"/api/runs/{run_id}")
    assert answer.status_code in (404, 409, 503)
    assert answer.json()["error"]["message"]
