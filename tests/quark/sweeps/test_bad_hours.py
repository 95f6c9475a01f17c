"""Stores that are away, logs of strangers, secrets and forks, in the midst of a trial."""

import json
import os
import subprocess
import sys

import pytest

import quark
from quark.cli.sweep_agent import TrialProcess
from quark.sweeps import sweep as sweep_module
from quark.sweeps import trial as trial_module
from quark.sweeps.definition import SweepDefinition
from quark.sweeps.optuna_search import EntryJournal
from quark.sweeps.rank_agreement import GivenTrial, RankAgreement
from quark.sweeps.search_algorithms import AshaSearch
from quark_core.backends.coordination import NewTrial, check_new_trials, clean_result
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.sweeps import TrialClaim, TrialResult

TOKEN = "ghp_" + "a1B2c3D4e5" * 4
ASHA = {"space": {"lr": quark.uniform(0, 1)}, "metric": "loss", "mode": "min", "budget": 27}
HOSTILE = [
    "[" * 100_000, "[]", "null", '"begin"', '{"begin": 5}', '{"begin": ["h", "x", [], {}]}',
    '{"begin": ["h", 1, "1", "", 5], "s": 1e999}', '{"next": ["x", "y", "z"]}', '{"next": 5}',
    '{"next": {"a": 1}}', '{"at": [1, 2, 3], "rank": Infinity}', '{"at": [[], 2, 3], "rank": 1}',
    '{"rung": [1, 2, [3]], "stop": true}', '{"trial": 0, "rung": [], "value": {}}',
    '{"trial": "x", "rung": 9, "value": 1}', "9" * 5_000, "\x00", '{"trial": 0, "rung": 1e999}',
]  # fmt: skip


class Log:
    """A log, and the link to it."""

    def __init__(self, entries):
        self.entries = entries
        self.store = self

    def read_entries(self, log, start, *, limit=10_000):
        return self.entries[start : start + limit]

    def append_entries(self, log, entries, *, request_id):
        self.entries.extend(entries)


def open_sweep(tmp_path, **given):
    return quark.sweep("s", project="p", **{**ASHA, **given}, search="asha", storage_dir=tmp_path)


@pytest.mark.parametrize("error", [SessionStoreError("away"), RuntimeError("odd")])
def test_a_store_that_does_not_decide_is_not_asked_at_each_rung(tmp_path, monkeypatch, error):
    asked = []

    def report(self, trial, values, step):
        asked.append(step)
        raise error

    monkeypatch.setattr(AshaSearch, "report", report)
    with open_sweep(tmp_path, trials=1) as sweep:
        trial = sweep.claim()
        for step in (1, 3, 9):
            trial.report(0.5, step=step)
            assert not trial.should_stop()
        assert asked == [1]
        # Once it has been left alone for a while, it is asked again.
        monkeypatch.setattr(trial, "_silent_until", 0.0)
        trial._watch.waiting.append((9, (0.5,)))
        assert not trial.should_stop()
        assert asked == [1, 9]
        assert trial._silent_s == 2 * trial_module._FIRST_SILENCE_S
        trial.complete()


def test_entries_of_strangers_leave_the_ranks_of_a_launch_as_they_are():
    log = Log([])
    leading = RankAgreement(log, "log", 0, 2, is_exact=True)
    leading.give(GivenTrial(3, 1, None))
    log.entries += HOSTILE
    leading.give(GivenTrial(4, 2, "earlier"))
    following = RankAgreement(log, "log", 1, 2, is_exact=True)
    assert following.take() == GivenTrial(3, 1, None)
    assert following.take() == GivenTrial(4, 2, "earlier")


def test_entries_of_strangers_leave_the_reports_of_asha_as_they_are(tmp_path):
    with open_sweep(tmp_path, trials=3) as sweep:
        first = sweep.claim()
    said = json.dumps({"trial": 1, "token": 1, "rung": 1, "value": 0.1})
    definition = SweepDefinition.build(ASHA | {"search": "asha"})
    search = AshaSearch(definition, "s0", Log([*HOSTILE, said]))
    # The report that stands behind all of those counts: it is the better one.
    assert search.report(first.stored, (0.5,), 1)


@pytest.mark.parametrize("value", ["NaN", "1e999", "-1e999", "9" * 400])
def test_a_strangers_parameter_that_is_no_number_reaches_no_sampler(value):
    space = {"name": "FloatDistribution", "attributes": {"low": 0.0, "high": 1.0, "log": False}}
    said = (
        '{"op_code": 5, "worker_id": "w", "trial_id": 0, "param_name": "lr", '
        f'"param_value_internal": %s, "distribution": {json.dumps(json.dumps(space))}}}'
    )
    log = Log([said % value, said % 0.5])
    refused, kept = EntryJournal(log, "log").read_logs(0)
    assert refused["op_code"] == 8
    assert kept["param_value_internal"] == 0.5


@pytest.mark.parametrize(
    "text", [f"s/{'9' * 5_000}/1", f"s/1/{'9' * 30}", "s\udcff/1/1", "s\x1b/1/1", "s/1", "s/-1/1"]
)
def test_a_claim_that_is_none_is_refused_by_the_variables_name(text):
    with pytest.raises(SchemaValidationError, match="QUARK_TRIAL must be"):
        TrialClaim.from_text(text)


@pytest.mark.parametrize("before", [0, 960, 980, 1_010])
def test_a_secret_at_the_end_of_a_reason_is_not_cut_in_two(before):
    reason = clean_result(TrialResult(state="failed", reason="x" * before + " " + TOKEN)).reason
    assert TOKEN[:12] not in reason


@pytest.mark.parametrize("before", [0, 280, 8_100, 8_150, 20_000])
def test_a_secret_in_the_last_line_of_a_script_is_not_in_the_reason(before):
    line = "x" * before + " " + TOKEN if before < 300 else TOKEN + "y" * before + " the end"
    code = f"import sys; sys.stderr.write({line!r})"
    process = TrialProcess([sys.executable, "-c", code], os.environ)
    while process.poll() is None:
        pass
    assert TOKEN[4:20] not in process.last_line
    assert "D4e5a1B2" not in process.last_line


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gives_nothing_back_that_its_parent_holds(tmp_path):
    code = """
import os, sys, quark
sweep = quark.sweep("s", storage_dir=sys.argv[1])
for trial in sweep:
    if os.fork() == 0:
        sys.exit(0)  # by its exit handlers
    assert os.wait()[1] == 0
    trial.complete(0.5)
"""
    with open_sweep(tmp_path, trials=2) as sweep:
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
        )
        assert "not released" not in done.stderr
        assert [(trial.state, trial.losses) for trial in sweep.trials()] == [("completed", 0)] * 2
    assert not sweep_module._held


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"lr": [0.1], "api_key": ["sk-one", "sk-two"]}, r"space\['api_key'\]"),
        ({"lr": [0.1], "password": "hunter2hunter2"}, r"space\['password'\]"),
        ({"token": quark.uniform(0, 1)}, r"space\['token'\]"),
        ({"model": ["ghp_abcdefghijklmnopqrstuvwxyz0123456789", "b"]}, r"space\['model'\]"),
    ],
)
def test_a_space_with_a_secret_is_refused_since_trials_would_have_something_else(
    tmp_path, space, named
):
    with pytest.raises(SchemaValidationError, match=f"^{named} looks like a secret") as refused:
        quark.sweep("s", project="p", space=space, metric="loss", mode="min", storage_dir=tmp_path)
    assert "ghp_" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_origin_of_a_trial_is_kept_without_secrets():
    origin = {"source": "mine", "rung": 0, "password": "hunter2", "note": "api_key=hunter2"}
    (kept,) = check_new_trials([NewTrial(parameters={"lr": 0.1}, origin=origin)])
    assert kept.origin == {
        "source": "mine", "rung": 0, "password": "[redacted]", "note": "api_key=[redacted]"
    }  # fmt: skip
