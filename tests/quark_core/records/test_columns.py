"""Columns: filters keep what a plain loop keeps, and rows turn into records and back."""

import dataclasses
import math

import golden
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_strategies import records_of

from quark_core.errors import SchemaValidationError
from quark_core.records import (
    RECORD_TYPES,
    EventRecord,
    LayerSummaryRecord,
    LifecycleRecord,
    MetricRecord,
)
from quark_core.records.columns import Columns
from quark_core.records.json_object import JsonObject
from quark_core.records.query import Query
from quark_core.testing.fakes import make_samples

INDEX = st.none() | st.integers(0, 5)
KEYS = ("loss", "lr", "acc")
HEAD = (
    st.sampled_from(["r1", None]),
    st.sampled_from(["w1", "w2"]),
    *[st.integers(0, 2)] * 2,
    st.integers(0, 50),
    st.integers(0, 2**53),
)
JSON = st.sampled_from([None, JsonObject(), JsonObject({"a": [1]})])
TEXT = st.sampled_from([None, "one", "two"])
VALUE = st.sampled_from([0.5, -0.0, 2.0, math.inf, -math.inf])
METRIC = st.builds(
    MetricRecord, *HEAD, st.sampled_from(KEYS), TEXT, TEXT, VALUE, INDEX, INDEX, TEXT, JSON
)
SEVERITIES = ("info", "warning", "error")
EVENT = st.builds(
    EventRecord,
    *HEAD,
    st.sampled_from(["saved", "done"]),
    st.sampled_from(SEVERITIES),
    INDEX,
    INDEX,
    TEXT,
    JSON,
)
LIFECYCLE = st.builds(LifecycleRecord, *HEAD, st.sampled_from(["tag", "status"]), JSON)
LAYER = st.builds(
    LayerSummaryRecord,
    *HEAD,
    *[st.sampled_from(["encoder.0", "head"])] * 2,
    *[st.sampled_from(["activation", "forward"])] * 2,
    *[st.integers(0, 9)] * 2,
    INDEX,
    INDEX,
    st.sampled_from([None, (), (8, 16)]),
    *[st.none() | VALUE] * 6,
    JSON,
)
RECORDS = {kind: records_of(kind, VALUE) for kind in RECORD_TYPES}
RECORDS |= {"metric": METRIC, "event": EVENT, "layer": LAYER, "lifecycle": LIFECYCLE}
SAMPLES = {kind: make_samples(kind, "r")[0] for kind in RECORD_TYPES}
SAMPLES |= {kind: records[0] for kind, records in golden.RECORDS.items()}
SAMPLES |= {
    "metric": MetricRecord("r", "w", 0, 0, 0, 0, "loss", None, "loss", 0.5, 1),
    "event": EventRecord("r", "w", 0, 0, 0, 0, "saved", "info"),
    "layer": LayerSummaryRecord("r", "w", 0, 0, 0, 0, "m", "Linear", "activation", "forward", 0, 8),
    "lifecycle": LifecycleRecord("r", "w", 0, 0, 0, 0, "tag", None),
}
BOUNDS = dict.fromkeys(["step", "step_min", "step_max", "epoch", "epoch_min", "epoch_max"], INDEX)
FILTERS = st.fixed_dictionaries(
    {}, optional={**BOUNDS, "limit": INDEX, "include_non_finite": st.booleans()}
)


def fits(record, query):
    """What the docstring of Query says, for one record."""
    checks = [getattr(record, name) == value for name, value in query.equals.items()]
    checks += [getattr(record, name) in values for name, values in query.any_of.items()]
    for name in ("step", "epoch"):
        value = getattr(record, name)
        exact, low, high = (getattr(query, name + end) for end in ("", "_min", "_max"))
        if (exact, low, high) != (None, None, None):
            checks.append(value is not None)
        if value is not None:
            checks.append(exact is None or value == exact)
            checks.append(low is None or value >= low)
            checks.append(high is None or value <= high)
    if isinstance(record, MetricRecord) and not query.include_non_finite:
        checks.append(math.isfinite(record.value))
    return all(checks)


def select(records, query):
    found = [record for record in records if fits(record, query)]
    return found if query.limit is None else found[max(0, len(found) - query.limit) :]


@given(st.lists(METRIC), FILTERS, st.sampled_from([{}, {"metric_key": "lr"}, {"run_id": "r1"}]))
def test_metrics_are_selected_as_by_a_loop(records, filters, equals):
    query = Query(equals=equals, **filters)

    found = Columns.from_records("metric", records).select(query).to_records()

    assert list(found) == select(records, query)


@given(
    st.lists(EVENT),
    FILTERS,
    st.lists(st.sampled_from([*SEVERITIES, "debug"]), max_size=3).map(tuple),
    st.sampled_from([{}, {"event_type": "saved"}, {"status": "one", "event_type": "done"}]),
)
def test_events_are_selected_as_by_a_loop(records, filters, severities, equals):
    query = Query(equals=equals, any_of={"severity": severities}, **filters)

    found = Columns.from_records("event", records).select(query).to_records()

    assert list(found) == select(records, query)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_records_come_back_as_they_were(kind):
    @given(st.lists(RECORDS[kind]))
    def check(records):
        columns = Columns.from_records(kind, records)

        assert columns.count == len(records)
        assert columns.to_records() == tuple(records)
        assert {len(array) for array in columns.values()} == {len(records)}

    check()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_parts_follow_each_other(kind):
    @given(st.lists(st.lists(RECORDS[kind], max_size=4), max_size=4))
    def check(parts):
        together = Columns.concatenate(kind, [Columns.from_records(kind, part) for part in parts])

        assert together.to_records() == tuple(record for part in parts for record in part)
        assert together.count == sum(map(len, parts))

    check()


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_columns_of_no_rows_have_the_columns_and_types_of_any_other(kind):
    empty = Columns.empty(kind)
    joined = Columns.concatenate(kind, [empty, empty])
    full = Columns.from_records(kind, [SAMPLES[kind]])

    assert list(empty) == list(joined) == list(full)
    assert empty.count == joined.count == 0
    assert empty.to_records() == ()
    for name, array in empty.items():
        assert len(array) == 0
        assert joined[name].dtype == array.dtype == full[name].dtype


@pytest.mark.long
@given(st.lists(METRIC, min_size=1), st.integers(0, 20))
def test_a_limit_keeps_the_newest_in_their_order(records, limit):
    newest = Columns.from_records("metric", records).keep_newest(limit).to_records()

    assert newest == tuple(records[max(0, len(records) - limit) :])


@given(st.lists(METRIC))
def test_ordering_by_sequence_is_stable(records):
    ordered = Columns.from_records("metric", records).order_by_sequence().to_records()

    assert list(ordered) == sorted(records, key=lambda record: record.sequence)


@pytest.mark.parametrize("bounds", [{"step_min": 2}, {"step_max": 0}])
def test_an_exact_step_does_not_overrule_a_bound(bounds):
    columns = Columns.from_records("metric", metrics(0.5, 0.5, 0.5))

    assert columns.select(Query(step=1)).count == 1
    assert columns.select(Query(step=1, **bounds)).count == 0


def metrics(*values):
    return [
        MetricRecord("r", "w", 0, 0, i, i, "loss", None, "loss", value, step=i)
        for i, value in enumerate(values)
    ]


def test_the_mask_tells_what_is_finite_and_the_values_stay():
    columns = Columns.from_records("metric", metrics(1.0, math.nan, math.inf, -math.inf, 0.0))

    assert columns["finite"].tolist() == [True, False, False, False, True]
    assert math.isnan(columns["value"][1])
    assert columns["value"][2] == math.inf
    finite = columns.select(Query(include_non_finite=False))
    assert finite["step"].tolist() == [0, 4]


def test_missing_steps_are_minus_one_and_fit_no_bound():
    records = [dataclasses.replace(record, step=None, epoch=1) for record in metrics(1.0, 2.0)]
    columns = Columns.from_records("metric", records)

    assert columns["step"].tolist() == [-1, -1]
    assert columns["step"].dtype == np.int64
    assert columns.select(Query(step_min=0)).count == 0
    assert columns.select(Query(step_max=100)).count == 0
    assert columns.select(Query(epoch_max=1)).count == 2


def test_columns_are_a_read_only_mapping_that_names_what_it_has():
    columns = Columns.from_records("metric", metrics(1.0))

    assert set(columns) == {*MetricRecord.__struct_fields__, "finite"}
    assert len(columns) == len(list(columns))
    assert "finite" not in Columns.empty("event")
    with pytest.raises(TypeError):
        columns["value"] = np.zeros(1)
    with pytest.raises(KeyError, match=r"metric columns are .*value.*, not 'valu'"):
        columns["valu"]


@pytest.mark.parametrize("bound", [*BOUNDS, "limit"])
@pytest.mark.parametrize("value", [-1, 1.0, "3", True, np.bool_(True), 2**63])
def test_a_bound_that_is_no_index_is_refused_by_name(bound, value):
    with pytest.raises(SchemaValidationError, match=f"^{bound} must"):
        Query.build(**{bound: value})


def test_a_query_leaves_out_what_is_none_and_takes_any_integer():
    query = Query.build(
        equals={"metric_key": None, "run_id": "r"}, any_of={"severity": None}, step=np.int32(3)
    )

    assert query == Query(equals={"run_id": "r"}, step=3)
    assert type(query.step) is int
