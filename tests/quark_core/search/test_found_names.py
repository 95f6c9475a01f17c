"""Searches and summaries take names as people wrote them, and say so where they do not know one."""

import copy
import pickle
import warnings

import pytest

import quark
from quark_core.backends.run_summary import MetricSummaries, MetricSummary, RunSummary
from quark_core.runs.run_search import build_search
from quark_core.search.fallback import search_by_reading
from quark_core.search.resolution import write_name

CONFIG = {
    "lr": 0.1,
    "opt": {"weight decay": 0.1, "lr": 3.0, "an odd.one": {"2nd": 7}},
    "top level": {"plain": "x"},
    "group": {f"k{index}": index for index in range(9)},
}


@pytest.fixture
def root(tmp_path):
    with (
        quark.start_run(project="p", storage_dir=tmp_path, config=CONFIG, tags=["x"]) as session,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        metrics = quark.MetricsLogger(session)
        metrics.log("train/acc@1", 0.5, step=0)
        metrics.log("val/loss", 0.25, step=1)
        metrics.log("2nd try", 2.0, step=2)
        metrics.log("mean_x40_1", 4.0, step=3)
        metrics.log("step", 5.0, step=4)
    return tmp_path


def search_both(root, where):
    """How many runs the store finds, and how many are found by reading it."""
    from quark_core.runs.backend_choice import open_reader

    found = len(quark.search_runs(storage_dir=root, where=where))
    reader = open_reader(root)
    try:
        assert len(search_by_reading(reader, build_search(where=where))) == found
    finally:
        reader.close()
    return found


def find_mistake(root, where):
    with pytest.raises(quark.SchemaValidationError) as caught:
        search_both(root, where)
    return str(caught.value).partition("\n")[0]


@pytest.mark.parametrize(
    "where",
    [
        "config.opt.`weight decay` == 0.1",
        "config.`opt.weight decay` == 0.1",
        "config.`opt`.`weight decay` == 0.1",
        "0.1 == config.opt.`weight decay` and config.`lr` == 0.1",
        "config.`opt`.lr == 3",
        "config.opt.`an odd.one`.2nd == 7",
        "config.`top level`.plain == 'x'",
        "config.`top level`.`plain` in ('x', 'y')",
    ],
)
def test_any_level_of_a_configuration_may_stand_in_backticks(root, where):
    assert search_both(root, where) == 1


def test_sorting_takes_the_same_names(root):
    orders = ["-config.opt.`weight decay`", "config.`top level`.plain desc"]
    assert len(quark.search_runs(storage_dir=root, order_by=orders)) == 1


@pytest.mark.long
def test_a_group_of_the_configuration_is_called_one(root):
    message = find_mistake(root, "config.opt == null")
    assert "config.opt is a group, not a value" in message
    assert "config.opt.lr, config.opt.`weight decay`" in message
    assert find_mistake(root, "config.group != 3").endswith("config.group.k4, config.group.k5, …")
    assert "config.`top level` is a group" in find_mistake(root, "config.`top level` == 1")
    assert "no run has the config key" in find_mistake(root, "config.op == null")


@pytest.mark.parametrize("where", ["tag == 'x'", "tag in ('x', 'y')", "'x' in tag", "'x' == Tag"])
def test_an_unknown_metric_is_told_before_its_type(root, where):
    message = find_mistake(root, where)
    assert "no run has the metric" in message
    assert message.endswith("did you mean 'x' in tags?")


def test_no_tag_is_suggested_where_no_text_was_given(root):
    assert find_mistake(root, "tag == 3").endswith("the nearest names are tags")
    assert "the nearest names are val/loss" in find_mistake(root, "val/los == 'x'")


@pytest.mark.parametrize(
    ("where", "column"),
    [
        ("val/loss == 'x'", 13),
        ("val/loss in (1, true, 'x')", 17),
        ("not max(val/loss) != false", 22),
        ("val/loss < 1 and val/loss < 'x'", 29),
    ],
)
def test_a_known_metric_is_compared_with_numbers_only(root, where, column):
    message = find_mistake(root, where)
    assert message.startswith(f"where, column {column}: as a metric, val/loss is a number")
    # Where there is no run, no name is unknown; a metric is a number all the same.
    with pytest.raises(quark.SchemaValidationError, match="as a metric"):
        quark.search_runs(storage_dir=root, project="none", where=where)


def test_no_text_is_in_a_known_metric(root):
    assert "column 8: val/loss is not a text" in find_mistake(root, "'a' in val/loss")


@pytest.mark.long
def test_suggested_names_can_be_written(root):
    assert find_mistake(root, "train/acc@2 > 1").endswith("the nearest names are train/acc@1")
    listed = find_mistake(root, "zzz > 1").rpartition("the names are ")[2].split(", ")
    assert listed == ["`2nd try`", "mean_x40_1", "metric.step", "train/acc@1", "val/loss"]
    message = find_mistake(root, "config.opt.`weigt decay` == 1")
    assert "config.opt.`weight decay`" in message
    for name in listed:
        assert search_both(root, f"count({name}) == 1") == 1


@pytest.mark.parametrize(
    ("scope", "stored", "written"),
    [
        ("metric", "a_x40_1", "a@1"),
        ("metric", "and", "`and`"),
        ("metric", "started", "metric.started"),
        ("metric", "config.lr", "`config.lr`"),
        ("metric", "a_x60_b", "a_x60_b"),
        ("metric", "a_x0a_b", "a_x0a_b"),
        ("config", "a b.c", "config.`a b`.c"),
        ("config", "a.b c", "config.a.`b c`"),
        ("config", "a .", "config.`a .`"),
        ("config", "a`b", "config.a`b"),
        ("run", "step", "step"),
    ],
)
def test_names_are_written_as_a_search_reads_them(scope, stored, written):
    assert write_name(scope, stored) == written


def test_metrics_are_found_by_either_name(root):
    (run,) = quark.search_runs(storage_dir=root)
    metrics = run.metrics
    assert list(metrics) == sorted(metrics)
    assert "train/acc_x40_1" in list(metrics)
    assert "train/acc@1" not in list(metrics)
    assert metrics["train/acc@1"] == metrics["train/acc_x40_1"]
    assert metrics["train/acc@1"].key == "train/acc_x40_1"
    assert metrics["2nd try"].last == 2.0
    assert "2nd try" in metrics
    assert metrics.get("absent@1") is None
    # What looks like a stored key is one: this is not `mean@1`, which no one logged.
    assert "mean_x40_1" not in metrics
    assert "mean@1" not in metrics
    with pytest.raises(KeyError, match=r"^'absent@1'$"):
        metrics["absent@1"]
    with pytest.raises(KeyError):
        metrics[3]


def test_metrics_compare_copy_and_pickle_like_a_dict(root):
    (run,) = quark.search_runs(storage_dir=root)
    plain = {key: run.metrics[key] for key in run.metrics}
    assert type(plain) is dict
    assert run.metrics == plain
    assert plain == run.metrics
    assert run.metrics != {}
    for twin in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert twin == run
        assert twin.metrics["train/acc@1"].last == 0.5
        assert list(twin.metrics) == list(run.metrics)
    assert repr(run.metrics) == repr(plain)


def test_a_summary_of_plain_metrics_finds_both_names(root):
    summary = MetricSummary(
        key="a_x40_1", count=1, non_finite=0, first=1.0, last=1.0, low=1.0, high=1.0, last_step=0
    )
    (run,) = quark.search_runs(storage_dir=root)
    made = RunSummary(stored=run.stored, metrics={"a_x40_1": summary})
    assert made.metrics["a@1"] is summary
    assert made.metrics == {"a_x40_1": summary}
    assert made == RunSummary(stored=run.stored, metrics=MetricSummaries(made.metrics))
    assert RunSummary(stored=run.stored).metrics == {}
