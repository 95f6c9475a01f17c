"""What is known of a run without reading it is what reading it would say."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Store, Writer
from tiers import count_examples

import quark
from quark_backends.store.writing import metrics
from quark_backends.store.writing import metrics as figures
from quark_backends.store.writing.summaries import flatten_config, rebuild_metrics
from quark_core.records.query import Query

VALUES = st.floats(-5, 5) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])
POINTS = st.tuples(
    st.sampled_from(["a", "b/c", "d"]), VALUES, st.none() | st.integers(0, 9), st.none()
)


def stored_figures(store):
    rows = store.connection.execute(
        "SELECT text, count, non_finite, first, last, low, high, last_step FROM run_metric"
        " JOIN name ON name.pk = name_pk ORDER BY text"
    )
    return {row[0]: row[1:] for row in rows}


def expected_figures(store):
    """The same, from what readers see."""
    found = store.reader.read(store.run_id, "metric", Query())
    out = {}
    for record in found.to_records():
        out.setdefault(record.metric_key, []).append(record)
    return {key: sum_up(records) for key, records in out.items()}


def sum_up(records):
    values = [record.value for record in records]
    finite = [value for value in values if math.isfinite(value)]
    return (
        len(values),
        len(values) - len(finite),
        values[0] if math.isfinite(values[0]) else None,
        values[-1] if math.isfinite(values[-1]) else None,
        min(finite, default=None),
        max(finite, default=None),
        records[-1].step,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("few_rows", [0, 10**6], ids=["arrays", "rows"])
def test_figures_are_those_of_the_visible_points(tmp_path_factory, monkeypatch, few_rows):
    monkeypatch.setattr(figures, "_FEW_ROWS", few_rows)
    monkeypatch.setattr(metrics, "_SHARE", 0)  # figures are made again whenever it is due

    @settings(
        max_examples=count_examples(60),
        deadline=None,
    )
    @given(st.data())
    def check(data):
        store = Store(tmp_path_factory.mktemp("store"))
        try:
            for _ in range(data.draw(st.integers(1, 3))):
                from_step = data.draw(st.none() | st.integers(0, 9))
                first = store.start(from_step=from_step if store.attempt >= 0 else None)
                writers = [first, Writer(store, first.attempt, rank=1)]
                for _ in range(data.draw(st.integers(0, 4))):
                    writer = data.draw(st.sampled_from(writers))
                    points = data.draw(st.lists(POINTS, min_size=1, max_size=12))
                    records = [
                        writer.metric(key, value, step, 3 if step is None else None)
                        for key, value, step, _ in points
                    ]
                    order = data.draw(st.permutations(records)) if len(records) < 5 else records
                    writer.write(order)
                if data.draw(st.booleans()):
                    store.compact()
            expected = expected_figures(store)
            assert stored_figures(store) == expected
            newest = max((r[-1] for r in [(-1,), *list_steps(store)]), default=-1)
            assert store.connection.execute("SELECT newest_step FROM run").fetchone()[0] == (
                None if newest < 0 else newest
            )
            (run_pk,) = store.connection.execute("SELECT pk FROM run").fetchone()
            rebuild_metrics(store.connection, run_pk)
            assert stored_figures(store) == expected
        finally:
            store.close()

    check()


def list_steps(store):
    found = store.reader.read(store.run_id, "metric", Query())
    return [(step,) for step in found["step"].tolist()]


def test_tags_and_configuration_can_be_searched_as_they_change(tmp_path):
    config = {"lr": 3e-4, "model": {"depth": 4, "name": "résnet"}, "amp": True, "seed": None}
    config |= {"layers": [1, 2], "empty": {}, "huge": 10**400}
    with quark.start_run(
        project="p", storage_dir=tmp_path, config=config, tags=["b", "a"]
    ) as session:
        session.add_tag("c")
    import sqlite3

    connection = sqlite3.connect(session.context.db_path)
    tags = connection.execute("SELECT tag FROM run_tag ORDER BY tag").fetchall()
    assert tags == [("a",), ("b",), ("c",)]
    rows = connection.execute("SELECT key, type, number, text FROM run_config ORDER BY key")
    found = {key: rest for key, *rest in rows}
    connection.close()
    assert found["lr"] == ["number", 3e-4, None]
    assert found["model.depth"] == ["number", 4.0, None]
    assert found["model.name"] == ["text", None, "résnet"]
    assert found["amp"] == ["bool", 1.0, None]
    assert found["seed"] == ["null", None, None]
    assert found["layers"] == ["json", None, "[1, 2]"]
    assert json.loads(found["empty"][2]) == {}
    assert found["huge"][0] == "text"


def test_numbers_that_no_column_holds_are_kept_as_text():
    assert list(flatten_config({"a": 10**400})) == [("a", "text", None, str(10**400))]
    assert list(flatten_config({"a": {"b": {"c": 1}}})) == [("a.b.c", "number", 1.0, None)]
