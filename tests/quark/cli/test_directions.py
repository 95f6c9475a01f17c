"""That a metric is better one way in every answer: the name decides, or who has declared it."""

import json

import pytest
from click.testing import CliRunner

import quark
from quark.analysis.metric_roles import list_objectives
from quark.cli.main import cli
from quark_core.errors import SchemaValidationError

NAMES = """
    val/error_rate val/word_error_rate val/mape val/bpb val/brier val/ece val/score_loss
    eval/return_loss val/latency_ms val/lpips val/kid val/nce val/hinge val/cost val/regret
    val/logloss
    val/ndcg val/mrr val/dice val/kappa val/mcc val/hit_rate val/win_rate val/throughput
    train/tokens_per_second val/elbo val/jaccard val/exact_match val/meteor val/rouge1
    val/loss_reward val/sensitivity val/err_acc val/auprc
    val/entropy val/energy loss/std
""".split()
LOWER, KNOWN = 16, 34
WORDS = {"min": "lower", "max": "higher", None: "none"}


def make_two(root, names, **arguments):
    """Two runs with metrics of these names: 1 and 2 in the first, 3 and 4 in the other."""
    ids = []
    for start in (1.0, 3.0):
        with quark.start_run(
            project="p", config={"start": start}, storage_dir=root, **arguments
        ) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(2):
                metrics.log(dict.fromkeys(names, start + step), step=step)
        ids.append(session.id)
    return ids


def show_directions(root, run_id):
    shown = CliRunner().invoke(cli, ["show", run_id, "--storage-dir", str(root), "--json"])
    return {m["name"]: m["direction"] for m in json.loads(shown.stdout)["metrics"]}


def compare_directions(root, ids):
    first, second = (quark.open_run(run_id, storage_dir=root) for run_id in ids)
    compared = quark.ComparisonEngine(second).compare(first)
    return {diff.metric_key: diff.direction for diff in compared.metric_diffs}


def find_best(root, name):
    try:
        return quark.best_run(name, storage_dir=root).run_id
    except SchemaValidationError:
        return None


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("directions")
    return root, make_two(root, NAMES)


def test_every_answer_has_the_same_direction(store):
    root, (first, second) = store
    shown, compared = show_directions(root, first), compare_directions(root, (first, second))
    for place, name in enumerate(NAMES):
        mode = "min" if place < LOWER else "max" if place < KNOWN else None
        assert shown[name] == mode, name
        assert compared[name] == WORDS[mode], name
        assert find_best(root, name) == {"min": first, "max": second, None: None}[mode], name
        assert list_objectives({"metric": name}) == [(name, mode or "min")]


@pytest.mark.parametrize("name", ["val/entropy", "val/acc", "val/loss"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_declared_mode_goes_before_the_name_in_every_answer(name, mode, tmp_path):
    ids = make_two(tmp_path, [name], objective=name, mode=mode)
    assert show_directions(tmp_path, ids[0]) == {name: mode}
    assert compare_directions(tmp_path, ids) == {name: WORDS[mode]}
    assert find_best(tmp_path, name) == ids[mode == "max"]
    run = quark.open_run(ids[0], storage_dir=tmp_path)
    asked = quark.AnalyzerEngineConfig(objective=name, objective_mode="max")
    for config, expected in ((None, mode), (asked, "max")):
        result = quark.AnalyzerEngine(run, config=config).analyze()
        assert result.health_scores[0].metadata["learning"]["mode"] == expected
