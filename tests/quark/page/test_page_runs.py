"""The list of runs: pages, columns, searches, names, standings, small curves."""

import json

import numpy as np
import pytest
from page_client import log_plain_run

import quark


@pytest.fixture(scope="session")
def many_store(tmp_path_factory):
    """A store with seven runs of two projects, the ids in the order in which they began."""
    folder = tmp_path_factory.mktemp("many")
    ids = [
        log_plain_run(
            folder,
            steps=5 + number,
            project="a" if number < 5 else "b",
            config={"lr": 10.0**-number, "model": {"name": f"m{number}"}},
            tags=["even"] if number % 2 == 0 else [],
            name=f"run-{number}",
        )
        for number in range(7)
    ]
    return folder, ids


@pytest.fixture
def many(many_store, look):
    folder, ids = many_store
    client = look(folder)
    client.ids = ids
    return client


def test_about_says_what_is_looked_at(many):
    about = many.json("/api/about")
    assert about["projects"] == [{"name": "b", "runs": 2}, {"name": "a", "runs": 5}]
    assert about["backend"] == "embedded"
    assert about["capabilities"]["changes"] is True
    assert about["notes"] == []
    assert about["version"] == quark.__version__


def test_runs_come_newest_first_page_by_page(many):
    seen, after = [], None
    for _ in range(4):
        cursor = {} if after is None else {"after": after}
        page = many.json("/api/runs", limit=2, **cursor)
        assert page["count"] == 7
        seen += [row["id"] for row in page["rows"]]
        after = page["next"]
    assert after is None
    assert seen == many.ids[::-1]


def test_columns_are_fields_metrics_and_settings(many):
    columns = ["min(train/loss)", "val/acc@1", "config.lr", "config.model.name", "tags", "created"]
    page = many.json("/api/runs", column=columns, limit=1)
    row = page["rows"][0]
    assert row["values"] == [1 / 11, 10 / 11, 1e-6, "m6", ["even"], row["created_at"]]
    assert [column["scope"] for column in page["columns"]] == [
        "metric",
        "metric",
        "config",
        "config",
        "run",
        "run",
    ]
    assert page["columns"][1]["key"] == "val/acc_x40_1"
    assert page["columns"][1]["name"] == "val/acc@1"
    assert page["columns"][0]["statistic"] == "min"
    # What no run has is an empty column, and no mistake.
    assert many.json("/api/runs", column="never/logged", limit=1)["rows"][0]["values"] == [None]


def test_where_and_order_are_the_language_of_searches(many):
    page = many.json("/api/runs", where="'even' in tags and config.lr < 0.5", order="config.lr")
    assert [row["name"] for row in page["rows"]] == ["run-6", "run-4", "run-2"]
    assert page["count"] == 3
    page = many.json("/api/runs", order=["-count(train/loss)", "name"], project="a")
    assert [row["name"] for row in page["rows"]] == [f"run-{n}" for n in (4, 3, 2, 1, 0)]


def test_a_mistake_in_a_search_is_pointed_at(many):
    message = many.refused(400, "/api/runs", where="train/los < 1")
    first, line, caret = message.split("\n")
    assert first.startswith("where, column 1:")
    assert "train/loss" in first
    assert line == "  train/los < 1"
    assert caret == "  ^^^^^^^^^"
    assert "column" in many.refused(400, "/api/runs", column="min(")
    assert "order" in many.refused(400, "/api/runs", order="tags")


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "201"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": ["1", "2"]}, "limit"),
        ({"after": "no cursor"}, "after"),
        ({"after": "x" * 200}, "after"),
        ({"column": [f"c{n}" for n in range(41)]}, "column"),
        ({"order": [f"c{n}" for n in range(11)]}, "order"),
        ({"where": "x" * 30_000}, "where"),
        ({"project": "x" * 3_000}, "project"),
    ],
)
def test_a_bad_parameter_is_named(many, parameters, named):
    assert named in many.refused(400, "/api/runs", **parameters)


def test_a_cursor_of_another_search_is_refused(many):
    after = many.json("/api/runs", limit=2)["next"]
    assert "after" in many.refused(400, "/api/runs", limit=2, after=after, where="name != 'x'")


@pytest.mark.long
def test_live_runs_stand_first(tmp_path, look):
    live = quark.start_run(project="p", storage_dir=tmp_path, name="live")
    with live, quark.MetricsLogger(live) as metrics:
        metrics.log("train/loss", 0.5, step=1)
        ended = [log_in_process(tmp_path, name) for name in ("first", "second")]
        page = look(tmp_path).json("/api/runs", limit=2)
        names = [row["name"] for row in page["rows"]]
        assert names == ["live", "second", "first"][: len(names)]
        assert page["rows"][0]["state"] == "running"
        assert page["rows"][0]["pending"] is False
        assert ended


def log_in_process(folder, name):
    """A run beside one that this process has open."""
    import subprocess
    import sys

    code = (
        "import sys, quark\n"
        "s = quark.start_run(project='p', storage_dir=sys.argv[1], name=sys.argv[2])\n"
        "m = quark.MetricsLogger(s)\n"
        "m.log('train/loss', 1.0, step=0)\n"
        "s.end_run()\n"
        "print(s.run_id)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), name], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_names_for_completion(many):
    names = many.json("/api/names")
    assert [metric["name"] for metric in names["metrics"]] == ["train/loss", "val/acc@1"]
    assert [entry["written"] for entry in names["config"]] == ["config.lr", "config.model.name"]
    assert names["config"][0]["types"] == ["number"]
    assert len(names["config"][0]["values"]) == 5
    assert names["tags"] == [{"tag": "even", "runs": 4}]
    assert "duration" in names["fields"]
    assert names["functions"] == ["last", "min", "max", "first", "count"]
    some = many.json("/api/names", prefix="config.mod")
    assert [entry["key"] for entry in some["config"]] == ["model.name"]
    assert some["metrics"] == []
    assert many.json("/api/names", project="b")["tags"] == [{"tag": "even", "runs": 1}]


def test_standings_of_visible_rows(many):
    wanted = [many.ids[0], "gone"]
    standings = many.json("/api/standings", run=wanted, column=["train/loss", "config.lr"])
    assert list(standings["standings"]) == [many.ids[0]]
    standing = standings["standings"][many.ids[0]]
    assert standing["health"] is standing["worst"] is standing["phase"] is None
    assert standing["main"] == {
        "key": "train/loss",
        "name": "train/loss",
        "last": 0.2,
        "count": 5,
        "non_finite": 0,
    }
    assert standing["values"] == [0.2, 1.0]
    assert standing["progress"]["step"] == 4
    assert "run" in many.refused(400, "/api/standings", run=[f"r{n}" for n in range(51)])


def test_sparks_of_visible_rows(many):
    head, columns = many.pack("/api/sparks", run=[*many.ids[:2], "gone"])
    assert [curve["run"] for curve in head["curves"]] == many.ids[:2]
    assert [curve["key"] for curve in head["curves"]] == ["train/loss"] * 2
    assert np.allclose(columns["0.mean"], 1 / np.arange(1, 6))
    head, _ = many.pack("/api/sparks", run=many.ids, key="val/acc@1")
    assert {curve["name"] for curve in head["curves"]} == {"val/acc@1"}
    assert many.pack("/api/sparks", run=many.ids, key="never")[0]["curves"] == []


def test_a_metric_whose_newest_value_is_not_finite(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        for step, value in enumerate([1.0, float("nan")]):
            metrics.log("train/loss", value, step=step)
    client = look(tmp_path)
    row = client.json("/api/runs", column=["train/loss", "min(train/loss)"])["rows"][0]
    assert row["values"] == ["NaN", 1.0]
    standing = client.json("/api/standings", run=session.run_id)["standings"][session.run_id]
    assert standing["main"]["last"] == "NaN"
    assert json.dumps(standing, allow_nan=False)
