"""A category that nobody could judge says so, in the record and wherever it is shown."""

import csv
import json

import pytest

import quark
from quark.analysis.comparison.engine import compare_health_scores
from quark_backends.mirror_records import Curves
from quark_backends.mlflow.lifecycle import list_finding_tags
from quark_backends.mlflow.points import list_values
from quark_backends.store.reading.reader import encode_outputs
from quark_core.backends.contract import Generation
from quark_core.records import HealthScoreRecord
from quark_core.records.codec import decode_body, encode_columns
from quark_core.records.columns import Columns
from quark_core.records.json_object import JsonObject
from quark_core.records.schema import column_types, validate_record

JUDGED = ("overall", "optimization")
NOT_JUDGED = ("representation", "runtime")


@pytest.fixture
def session(tmp_path):
    """A run with a training loss and nothing else."""
    with quark.start_run(project="p", storage_dir=tmp_path, backends="csv:mirror") as session:
        metrics = quark.MetricsLogger(session)
        for step in range(60):
            metrics.log("train/loss", 1.0 / (step + 1), step=step)
    return session


def by_key(scores):
    return {score.score_key: score for score in scores}


def test_the_record_says_that_nothing_is_known_and_why(session):
    found = by_key(quark.AnalyzerEngine(session).analyze().health_scores)
    for key in JUDGED:
        assert (found[key].known, found[key].unknown_reason) == (True, None)
    for key in NOT_JUDGED:
        score = found[key]
        # The form of the guide stays: 0 to 100, and one of four statuses.
        assert (score.score, score.status) == (50.0, "watch")
        assert (score.known, score.unknown_reason) == (False, "no rule had the data it needs")
        assert validate_record(score) is score
        assert score.to_dict()["known"] is False
    stored = by_key(quark.AnalyzerEngine(session).read_health_scores())
    assert stored == found


def test_of_an_empty_run_nothing_is_known_at_all(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        scores = quark.AnalyzerEngine(session).analyze().health_scores
    assert {(score.known, score.status) for score in scores} == {(False, "watch")}


def test_older_records_read_as_before():
    new = HealthScoreRecord("r", "w", 0, 0, 0, 0, "runtime", "runtime", 50.0, "watch")
    values = {name: [getattr(new, name)] for name in column_types("health_score")}
    values["metadata"] = [JsonObject({"rules": 3, "rules_with_data": 0})]
    del values["known"], values["unknown_reason"]
    body = decode_body(encode_columns("health_score", 1, values))
    origin = {"run_id": "r", "writer_id": "w", "attempt": 0, "rank": 0}
    (old,) = Columns.from_body(body, origin).to_records()
    assert (old.known, old.unknown_reason, old.score, old.status) == (True, None, 50.0, "watch")
    # What they had to say of it was in the metadata only.
    assert (old.is_known, new.is_known) == (False, True)


def test_a_store_that_is_older_than_the_field_keeps_it(session):
    scores = quark.AnalyzerEngine(session).analyze().health_scores
    generation = Generation(
        run_id=session.run_id, analyzer="a", replaces=True, outputs={"health_score": scores}
    )
    ((_, count, body),) = encode_outputs(generation)
    assert decode_body(body).to_list("known") == [score.known for score in scores]
    assert count == 5


def test_mirrors_draw_no_point_of_it(session, tmp_path):
    found = by_key(quark.AnalyzerEngine(session).analyze().health_scores)
    unknown, known = found["runtime"], found["optimization"]
    assert list(list_values("health_score", [unknown], 9)) == []
    assert len(list(list_values("health_score", [unknown, known], 9))) == 1
    assert Curves("m").list_values(unknown) == []
    assert [name for name, _ in Curves("m").list_values(known)] == ["quark/health/optimization"]
    tags = list_finding_tags("health_score", [unknown, known])
    assert tags == {"quark.health.runtime": "not known", "quark.health.optimization": known.word}
    (path,) = tmp_path.rglob("health_scores.csv")
    with path.open(newline="") as file:
        rows = {row["score_key"]: row for row in csv.DictReader(file)}
    assert (rows["runtime"]["known"], rows["optimization"]["known"]) == ("false", "true")
    assert rows["runtime"]["unknown_reason"] == "no rule had the data it needs"


def test_a_comparison_takes_no_figure_of_it(session):
    scores = quark.AnalyzerEngine(session).analyze().health_scores
    diffs = {diff.score_key: diff for diff in compare_health_scores([scores], [scores])}
    assert (diffs["runtime"].primary, diffs["runtime"].difference) == (None, None)
    assert diffs["optimization"].difference == 0.0
    assert json.dumps(diffs["runtime"].to_dict())
