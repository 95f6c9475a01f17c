"""Why rules said nothing of a run: told of what is analyzed here and of what its store keeps."""

import pytest
from page_client import log_plain_run, wait_for_analysis

import quark
from quark.page.routes.findings import describe_analysis
from quark.page.routes.run_analysis import Analysis
from quark_core.records import HealthScoreRecord
from quark_core.records.json_object import JsonObject


def read_rules(client, run_id):
    return client.json(f"/api/runs/{run_id}/analysis")["analysis"]["rules"]


def test_what_is_kept_tells_what_an_analysis_of_the_server_s_own_tells(tmp_path, look):
    run_id = log_plain_run(tmp_path)
    computed = wait_for_analysis(look(tmp_path), run_id)
    assert computed["state"] == "computed"
    assert computed["rules"]["missing"]
    run = quark.open_run(run_id, storage_dir=tmp_path)
    result = quark.AnalyzerEngine(run).analyze(store=True)
    client = look(tmp_path)
    stored = client.json(f"/api/runs/{run_id}")["analysis"]
    assert stored["state"] == "stored"
    assert stored["rules"]["missing"] == computed["rules"]["missing"]
    assert {item["rule"] for item in stored["rules"]["missing"]} == {
        rule for rule, verdict in result.verdicts.items() if verdict.state == "no_data"
    }
    assert all(item["reason"] and item["data"] for item in stored["rules"]["missing"])
    assert stored["rules"]["note"] is None


def make_scores(**metadata):
    blank = {"score": 50.0, "status": "watch"}
    return tuple(
        HealthScoreRecord(
            "run0", "analyzer.1", 0, 0, place, 0, key, key, **blank, metadata=JsonObject(known)
        )
        for place, (key, known) in enumerate(metadata.items())
    )


def describe(scores):
    return describe_analysis(Analysis(state="stored", scores=scores))["rules"]


def test_of_an_older_analysis_it_is_said_that_it_is_not_known():
    rules = describe(make_scores(overall={"rules": 3, "rules_with_data": 1}))
    assert (rules["count"], rules["with_data"], rules["missing"]) == (3, 1, None)
    assert "quark analyze" in rules["note"]
    # Where all had their data, there is nothing to be told.
    rules = describe(make_scores(overall={"rules": 3, "rules_with_data": 3}))
    assert (rules["missing"], rules["note"]) == (None, None)


@pytest.mark.parametrize(
    "kept",
    ["x", 3, [1], {"a": 1}, {"a": {"reason": 3}}, {"a": {"reason": "r", "data": "no"}}, None],
)
def test_what_others_have_put_there_is_left_out(kept):
    rules = describe(
        make_scores(
            overall={"rules": 3, "rules_with_data": 1},
            optimization={"rules_without_data": kept},
            runtime={"rules_without_data": {"slow": {"reason": "no times", "data": ["telemetry"]}}},
        )
    )
    assert rules["missing"] == [{"rule": "slow", "reason": "no times", "data": ["telemetry"]}]
