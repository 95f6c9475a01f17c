"""A tensor with elements that are not finite: none of its figures passes for one of all of it."""

import numpy as np
import pytest

import quark
from quark_core.records import LayerSummaryRecord, ParameterSummaryRecord
from quark_core.records.base import start_fields

STEPS = 12
# At the last of these no element is finite, so that there is no norm at all.
BROKEN = {1: (1, 0), 5: (2, 0), 6: (0, 3), 11: (10, 0)}


def make_layer(name, step, nan_count, inf_count):
    return LayerSummaryRecord(
        *start_fields(None), name, "Linear", "activation", "forward", 0, 10, step=step,
        norm=None if nan_count == 10 else 100.0 + step, dead_unit_ratio=0.5,
        nan_count=nan_count, inf_count=inf_count,
    )  # fmt: skip


def make_parameter(step, broken_values, broken_gradients):
    return ParameterSummaryRecord(
        *start_fields(None), "head", "Linear", "head.weight", "weight", "float32", 10, step=step,
        value_norm=1.0, gradient_norm=2.0, update_norm=3.0,
        non_finite_value_count=broken_values, non_finite_gradient_count=broken_gradients,
    )  # fmt: skip


@pytest.fixture
def broken(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session:
        for step in range(STEPS):
            counts = BROKEN.get(step, (0, 0))
            session.write(
                [
                    make_layer("head", step, *counts),
                    make_layer("whole", step, 0, 0),
                    make_parameter(step, counts[0], counts[1]),
                ]
            )
    client = look(tmp_path)
    client.run_id = session.run_id
    return client


def read_module(client, **parameters):
    """Field -> the one curve of it, as its head says it and with its columns."""
    head, columns = client.pack(f"/api/runs/{client.run_id}/module", **parameters)
    found = {}
    for place, said in enumerate(head["curves"]):
        names = [name for name in columns if name.startswith(f"{place}.")]
        found[said["field"]] = {**said, **{n.partition(".")[2]: columns[n] for n in names}}
    return found


def test_figures_of_a_broken_layer_are_not_finite_in_its_curves(broken):
    curves = read_module(broken, name="head", field=["norm", "dead_unit_ratio", "nan_count"])
    for field, whole in (("norm", 100.0), ("dead_unit_ratio", 0.5)):
        curve = curves[field]
        assert curve["step"].tolist() == list(range(STEPS)), field
        assert curve["non_finite"].tolist() == [float(step in BROKEN) for step in range(STEPS)]
        assert np.isnan(curve["mean"][list(BROKEN)]).all()
        assert curve["mean"][0] == whole
    # How many there are is known all the same.
    assert curves["nan_count"]["mean"].tolist() == [
        float(BROKEN.get(step, (0, 0))[0]) for step in range(STEPS)
    ]
    (other,) = read_module(broken, name="whole", field="norm").values()
    assert "non_finite" not in other or not other["non_finite"]


def test_what_is_broken_of_a_parameter_is_told_apart(broken):
    fields = ["value_norm", "gradient_norm", "update_norm"]
    curves = read_module(broken, kind="parameter", name="head.weight", field=fields)
    steps = {
        field: np.flatnonzero(np.isnan(curve["mean"])).tolist() for field, curve in curves.items()
    }
    assert steps == {"value_norm": [1, 5, 11], "gradient_norm": [6], "update_norm": []}


def test_a_map_shows_them_and_begins_with_what_is_whole(broken):
    path = f"/api/runs/{broken.run_id}/grid"
    for asked in ({}, {"low": 0, "high": STEPS}):
        head, columns = broken.pack(path, field="norm", summary="activation", **asked)
        assert [row["name"] for row in head["rows"]] == ["head", "whole"]
        bad = columns["bad"].reshape(2, STEPS)
        assert np.flatnonzero(bad[0]).tolist() == list(BROKEN)
        assert not bad[1].any()
        # Of steps 0, 2, 3, 4 and 7; the other row's are those of steps 0 to 4.
        assert columns["base"].tolist() == [103.0, 102.0]


def test_how_large_a_layer_is_stays_known(broken):
    path = f"/api/runs/{broken.run_id}"
    _, columns = broken.pack(f"{path}/grid", field="element_count")
    assert not columns["bad"].any()
    curve = read_module(broken, name="head", field="element_count")["element_count"]
    assert curve["mean"].tolist() == [10.0] * STEPS


def test_a_row_of_which_nothing_is_whole_has_a_beginning_all_the_same(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session:
        session.write([make_layer("head", step, 1, 0) for step in range(4)])
    _, columns = look(tmp_path).pack(f"/api/runs/{session.run_id}/grid", field="norm")
    assert columns["base"].tolist() == [101.5]
    assert columns["bad"].all()
