"""`where` over the trials of a sweep."""

from __future__ import annotations

import pytest

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject
from quark_core.records.sweeps import StoredTrial
from quark_core.search.parser import compile_trial_where

TRIAL = StoredTrial(
    "s1",
    4,
    JsonObject({"lr": 0.01, "optimizer": "adam", "model": {"layers": 3}, "weight decay": 0.1}),
    JsonObject({"rung": 1, "budget": 9, "source": "halving"}),
    "suspended",
    token=2,
    failures=1,
    worker=JsonObject({"host": "node7|boot|pid", "pid": 3, "started": ""}),
    claimed_at="2026-11-28T10:00:00.000000Z",
    run_id="abcd",
    values=(0.5, 0.1),
)


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        ("lr < 0.1", True),
        ("param.lr < 0.001", False),
        ("config.lr == 0.01", True),
        ("param.lr == 0.01 and failures == 0", False),
        ("optimizer in ('adam', 'sgd')", True),
        ("optimizer != 'adam'", False),
        ("'da' in optimizer", True),
        ("model.layers >= 3", True),
        ("`weight decay` > 0.05", True),
        ("param.`weight decay` > 0.5", False),
        ("momentum > 0", False),
        ("momentum == null", True),
        ("state == 'suspended'", True),
        ("not (state == 'waiting')", True),
        ("number in (1, 4)", True),
        ("rung == 1 and budget == 9", True),
        ("origin.source == 'halving'", True),
        ("origin.source == 'random'", False),
        ("token == 2 and losses == 0", True),
        ("value > 0.4", True),
        ("worker == 'node7'", True),
        ("run == 'abcd'", True),
        ("claimed >= '2026-11-28' and settled == null", True),
        ("trial.number == 4", True),
        ("param.number == 4", False),
        ("lr == 'adam'", False),
        ("lr != 'adam'", True),
    ],
)
def test_names_are_parameters_and_fields(where: str, fits: bool) -> None:
    assert compile_trial_where(where)(TRIAL) is fits


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("lr <", "expected"),
        ("state == 'done'", "state is one of waiting, running"),
        ("number == 'four'", "number is a number"),
        ("trial.lr == 1", "a trial has no field 'lr'"),
        ("min(value) < 1", "a trial has no min"),
        ("claimed > 'soon'", "this is no time"),
        ("lr = 0.1", "to compare, write =="),
    ],
)
def test_a_mistake_is_shown_at_its_place(where: str, message: str) -> None:
    with pytest.raises(SchemaValidationError, match=message) as caught:
        compile_trial_where(where)
    assert str(caught.value).startswith("where, column ")
    assert "^" in str(caught.value)


def test_values_that_are_not_finite_are_none() -> None:
    import msgspec

    broken = msgspec.structs.replace(TRIAL, values=(float("nan"),))
    assert compile_trial_where("value == null")(broken)
    assert not compile_trial_where("value < 1")(broken)
