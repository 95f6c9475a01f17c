"""What a run has printed, as its page asks for it."""

import pytest

import quark
from quark_core.records.base import start_fields
from quark_core.records.kinds.console import ConsoleRecord


@pytest.fixture
def client(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    session.write(
        ConsoleRecord(*start_fields(None), "stdout", number, f"line {number}")
        for number in range(500)
    )
    for percent in (10, 50, 90):
        bar = ConsoleRecord(*start_fields(None), "stderr", 0, f"<b>{percent} %</b>", False, 2)
        session.write([bar])
    session.end_run()
    client = look(tmp_path)
    client.path = f"/api/runs/{session.run_id}/console"
    client.run_id = session.run_id
    return client


def test_it_is_paged_from_its_end(client):
    page = client.json(client.path)
    assert len(page["lines"]) == 200
    assert page["lines"][-1]["text"] == "<b>90 %</b>"
    assert (page["lines"][-1]["is_whole"], page["lines"][-1]["left_out"]) == (False, 6)
    texts = [line["text"] for line in page["lines"]]
    while page["next"]:
        page = client.json(f"{client.path}?limit=150&before={page['next']}")
        texts = [*(line["text"] for line in page["lines"]), *texts]
    assert texts == [*(f"line {number}" for number in range(500)), "<b>90 %</b>"]


def test_lines_are_searched_and_a_stream_is_chosen(client):
    found = client.json(f"{client.path}?text=LINE 49")
    assert [line["text"] for line in found["lines"]] == [
        "line 49", *(f"line {number}" for number in range(490, 500)),
    ]  # fmt: skip
    assert found["next"] is None
    assert len(client.json(f"{client.path}?stream=stderr")["lines"]) == 1
    assert client.http.get(f"{client.path}?stream=other").status_code == 400
    assert client.http.get("/api/runs/nope/console").status_code == 404


def test_the_page_knows_that_there_are_some(client):
    assert client.json(f"/api/runs/{client.run_id}")["contents"]["console"]
