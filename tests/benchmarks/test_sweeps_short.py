"""The campaigns over trials in short: each trial is finished once, and the best is the same."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("store", ["embedded", "service", "postgres"])
def test_each_trial_is_finished_once(measure, store, request):
    if store == "postgres":
        request.getfixturevalue("postgres_server")
    (row,) = measure("benchmarks/claims.py", "campaign", "--stores", store)["campaign"]
    assert row["finished once"] == row["trials"] == 160
    assert row["kills"] > 0
    assert (row["deaths of the server"] > 0) == (store != "embedded")
    for wrong in ("twice", "lost", "claims given to two"):
        assert row[wrong] == 0, wrong


def test_claims_are_measured(measure):
    rows = measure("benchmarks/claims.py", "rate", "--stores", "embedded")["rate"]
    assert [row["processes"] for row in rows] == [1, 8, 1, 8]
    for row in rows:
        assert row["claim and settle /s"] > 0
        assert row["twice"] == 0
    assert [row["finished once"] for row in rows[2:]] == [200, 200]


def test_a_sweep_that_is_killed_and_resumed_has_the_same_best(measure):
    arguments = ("benchmarks/sweep_campaign.py", "--stores", "embedded", "--workers", "3")
    rows = measure(*arguments)["sweeps"]
    assert [row["search"] for row in rows] == ["random", "halving"]
    for row in rows:
        assert row["completed"] == row["with the undisturbed value, to the bit"] == row["trials"]
        assert row["same best"] == 1
        assert (row["lost"], row["twice"]) == (0, 0)
