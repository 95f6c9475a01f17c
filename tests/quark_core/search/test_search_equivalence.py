"""The store's SQL and the evaluation in Python give the same answers, whatever is asked."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_stores import BASE_US, Run, SearchStore
from tiers import count_examples

from quark_core.errors import SchemaValidationError
from quark_core.runs.run_search import build_search
from quark_core.search.fallback import select_runs

DAY_US = 86_400_000_000
NUMBERS = [-1.5, -0.0, 0, 0.1, 1, 2, 3e-4, 1e300, 2**53, 2**53 + 1]
TEXTS = ["", "a", "A", "ab", "é", "日本", "1", "true", "'", '"', "\\", "%", "_", "a%"]
METRICS = ["val/loss", "loss", "acc_x40_1", "config.lr"]
CONFIG_KEYS = ["lr", "optimizer.name", "flag", "odd key"]
TIMES = ["2026", "2026-01", "2026-01-01", "2026-01-02T12", "2026-01-03 00:00:00.5", "2025-12-31"]

values = st.one_of(st.sampled_from(NUMBERS), st.sampled_from([math.nan, math.inf, -math.inf]))
settings_values = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.just([1, "a"])
)


@st.composite
def configs(draw):
    return draw(
        st.fixed_dictionaries(
            {},
            optional={
                "lr": settings_values,
                "flag": settings_values,
                "odd key": settings_values,
                "optimizer": st.one_of(
                    settings_values, st.fixed_dictionaries({}, optional={"name": settings_values})
                ),
            },
        )
    )


@st.composite
def stores(draw):
    runs = []
    # Most names exist somewhere, so that most searches are no mistakes.
    complete = Run(
        id="complete",
        project="one",
        config={"lr": 0.1, "flag": True, "odd key": "a", "optimizer": {"name": "a"}},
        metrics={key: [0.1, 1.0] for key in METRICS},
    )
    if draw(st.integers(0, 9)):
        runs.append(complete)
    for index in range(draw(st.sampled_from([0, 3, 5, 7]))):
        status = draw(st.sampled_from(["completed", "failed", "running"]))
        created_us = BASE_US + draw(st.integers(0, 3)) * DAY_US
        ended_us = None if status == "running" else created_us + draw(st.integers(-1, 3)) * 500_000
        runs.append(
            Run(
                id=f"run{index}",
                project=draw(st.sampled_from(["one", "two"])),
                name=draw(st.none() | st.sampled_from(TEXTS)),
                notes=draw(st.none() | st.sampled_from(TEXTS)),
                status=status,
                attempt=draw(st.integers(0, 2)),
                parent=draw(st.none() | st.just("run0")),
                git_commit=draw(st.none() | st.sampled_from(TEXTS)),
                tags=tuple(draw(st.sets(st.sampled_from(["baseline", "big", "é"])))),
                config=draw(configs()),
                created_us=created_us,
                updated_us=created_us + draw(st.integers(0, 1)),
                ended_us=ended_us,
                heartbeat_us=created_us + draw(st.integers(-1, 2)) * 500_000,
                newest_step=draw(st.none() | st.integers(0, 3)),
                trashed=draw(st.sampled_from([False, False, False, True])),
                alive=draw(st.booleans()),
                metrics=draw(
                    st.dictionaries(
                        st.sampled_from(METRICS), st.lists(values, min_size=1, max_size=3)
                    )
                ),
            )
        )
    return runs


def quote(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


numbers = st.sampled_from([*map(repr, NUMBERS), "inf", "-inf", "0.05"])
texts = st.sampled_from(TEXTS).map(quote)
signs = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
equalities = st.sampled_from(["==", "!="])
metric_fields = st.builds(
    lambda name, form: form.format(name),
    st.sampled_from(["val/loss", "loss", "acc@1", "acc_x40_1", "metric.config.lr", "absent"]),
    st.sampled_from(["{}", "last({})", "first({})", "min({})", "max({})", "count({})"]),
)
config_fields = st.sampled_from(
    ["config.lr", "config.optimizer.name", "config.flag", "config.`odd key`", "config.optimizer"]
)
text_fields = st.sampled_from(["id", "name", "project", "parent", "notes", "run.git_commit"])
number_fields = st.sampled_from(["attempt", "step", "duration"])
time_fields = st.sampled_from(["created", "updated", "ended", "archived"])
fields = st.one_of(metric_fields, config_fields, text_fields, number_fields, time_fields)
states = st.sampled_from(["'running'", "'completed'", "'failed'"])


def compare(names, sign, given_values):
    return st.builds(" ".join, st.tuples(names, sign, given_values)) | st.builds(
        " ".join, st.tuples(given_values, sign, names)
    )


def among(names, given_values):
    return st.builds(
        lambda name, word, listed: f"{name} {word} ({', '.join(listed)})",
        names,
        st.sampled_from(["in", "not in"]),
        st.lists(given_values, min_size=1, max_size=3),
    )


conditions = st.one_of(
    compare(metric_fields, signs, numbers),
    compare(number_fields, signs, numbers),
    compare(text_fields, signs, texts),
    compare(config_fields, signs, numbers | texts),
    compare(config_fields, equalities, st.sampled_from(["true", "false"])),
    compare(time_fields, signs, st.sampled_from(TIMES).map(quote)),
    compare(st.sampled_from(["status", "state"]), signs, states),
    compare(st.just("state"), equalities, st.just("'lost'")),
    compare(fields | st.just("tags"), equalities, st.just("null")),
    among(metric_fields | number_fields, numbers),
    among(config_fields, numbers | texts | st.just("true")),
    among(time_fields, st.sampled_from(TIMES).map(quote)),
    st.builds(
        " ".join,
        st.tuples(
            st.sampled_from([text for text in TEXTS if text]).map(quote),
            st.sampled_from(["in", "not in"]),
            text_fields | config_fields,
        ),
    ),
    st.sampled_from(["'big' in tags", "'é' not in tags", "'absent' in tags"]),
)
expressions = st.recursive(
    conditions,
    lambda inner: st.one_of(
        inner.map(lambda text: f"not ({text})"),
        st.builds("({}) and {}".format, inner, inner),
        st.builds("{} or ({})".format, inner, inner),
    ),
    max_leaves=5,
)
orders = st.lists(
    st.builds("{}{}".format, st.sampled_from(["", "-"]), fields | st.just("state")), max_size=2
)


def list_newest_first(store, runs, project=None):
    visible = [
        (run.created_us, number, run.id)
        for number, run in enumerate(runs)
        if not run.trashed and project in (None, run.project)
    ]
    return [store.finder.summarize(run_id) for *_, run_id in sorted(visible, reverse=True)]


def answer(search):
    try:
        return [run.run_id for run in search()]
    except SchemaValidationError as error:
        return str(error)


searches = st.tuples(
    st.none() | expressions,
    orders,
    st.sampled_from([None, None, None, "one", "absent"]),
    st.sampled_from([None, None, None, 0, 1, 3]),
)


@pytest.mark.long
@settings(max_examples=count_examples(100), deadline=None)
@given(runs=stores(), asked=st.lists(searches, min_size=3, max_size=3))
def test_sql_and_python_agree(runs, asked):
    store = SearchStore(runs)
    for where, order_by, project, limit in asked:
        search = build_search(project=project, where=where, order_by=order_by, limit=limit)
        summaries = list_newest_first(store, runs, project)
        by_store = answer(lambda search=search: store.finder.search(search))
        by_python = answer(lambda search=search, runs=summaries: select_runs(runs, search))
        assert by_store == by_python, (where, order_by, project, limit)


@pytest.fixture(scope="module")
def crowd():
    """Runs of every kind, each value beside each other."""
    settings_values = [None, True, False, *NUMBERS, *TEXTS, [1, "a"], {}]
    figures = [*NUMBERS, math.nan, math.inf, -math.inf]
    states = ["completed", "failed", "running", "interrupted", "running"]
    runs = []
    for index in range(3 * len(settings_values)):
        created_us = BASE_US + (index % 4) * DAY_US - index % 2
        status = states[index % 5]
        value = settings_values[index % len(settings_values)]
        keys = ["lr", "flag", "odd key", "optimizer"]
        config = {keys[index % 3]: value, keys[3]: {"name": value} if index % 2 else value}
        number = figures[index % len(figures)]
        runs.append(
            Run(
                id=f"run{index}",
                name=[None, *TEXTS][index % (len(TEXTS) + 1)],
                notes=[*TEXTS, None][index % (len(TEXTS) + 1)],
                status=status,
                attempt=index % 3,
                parent=[None, "a"][index % 2],
                git_commit=["1", None, "ab"][index % 3],
                tags=[(), ("big",), ("big", "é"), ("a",)][index % 4],
                config=config if index % 7 else {},
                created_us=created_us,
                updated_us=created_us + index % 2,
                ended_us=None if status == "running" else created_us + (index % 5 - 1) * 500_000,
                heartbeat_us=created_us + (index % 3 - 1) * 500_000,
                newest_step=[None, 0, 1, 3][index % 4],
                trashed=index % 11 == 10,
                alive=index % 4 == 0,
                metrics={key: [1.0, number] for key in METRICS[index % 3 :]}
                if index % 5
                else {METRICS[0]: [number]},
            )
        )
    store = SearchStore(runs)
    return store, list_newest_first(store, runs)


SIGNS = ["==", "!=", "<", "<=", ">", ">="]
NUMBER_TEXTS = ["-1.5", "0", "0.1", "1", str(2**53 + 1), "inf"]
QUOTED = [quote(text) for text in ("", "a", "A", "é", "1", "\\")]
GRID = {
    "config": (
        ["config.lr", "config.optimizer.name", "config.flag", "config.optimizer"],
        [*NUMBER_TEXTS, *QUOTED],
    ),
    "metric": (["val/loss", "first(acc@1)", "min(loss)", "max(loss)", "count(loss)"], NUMBER_TEXTS),
    "number": (["attempt", "step", "duration"], NUMBER_TEXTS),
    "text": (["id", "name", "project", "parent", "notes", "git_commit"], QUOTED),
    "time": (["created", "updated", "ended", "archived"], [quote(text) for text in TIMES]),
    "state": (["status", "state"], ["'running'", "'completed'", "'failed'"]),
}


@pytest.mark.long
@pytest.mark.parametrize("group", GRID)
def test_every_comparison_agrees(crowd, group):
    store, runs = crowd
    names, given_values = GRID[group]
    asked = [f"{name} {sign} {value}" for name in names for sign in SIGNS for value in given_values]
    asked += [f"{name} == null" for name in names]
    asked += [f"{value} in {name}" for name in names for value in given_values if group == "text"]
    if group == "config":
        asked += [f"{name} {sign} true" for name in names for sign in SIGNS[:2]]
        asked += [f"{value} in {name}" for name in names for value in QUOTED if value != "''"]
    different = set()
    for text in asked:
        if text.startswith("'' in"):
            continue
        for where in (text, f"not {text}"):
            search = build_search(where=where)
            by_store = [run.run_id for run in store.finder.search(search)]
            assert by_store == [run.run_id for run in select_runs(runs, search)], where
            different.add(tuple(by_store))
    # What always finds the same would agree too.
    assert len(different) > 6


@pytest.mark.parametrize("name", [name for names, _ in GRID.values() for name in names])
def test_every_order_agrees(crowd, name):
    store, runs = crowd
    for sign in ("", "-"):
        search = build_search(order_by=f"{sign}{name}")
        by_store = [run.run_id for run in store.finder.search(search)]
        assert len(by_store) == len(runs)
        assert by_store == [run.run_id for run in select_runs(runs, search)]
