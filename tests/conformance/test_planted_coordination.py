"""The kit finds each weakness that was planted in a store of trials, and none in the sound one."""

import pytest
from planted_coordination import WEAK
from planted_runs import name_failing, run_planted

# The kit's part is run once, within the first test.
pytestmark = pytest.mark.timeout(900)

MODULE = """
import pytest
from planted_coordination import define

from quark_core.backends.contract import BackendConfig
from quark_core.testing.coordination_conformance import CoordinationConformance
from quark_core.testing.workers_conformance import WorkersConformance


class Planted(CoordinationConformance, WorkersConformance):
    @pytest.fixture
    def definition(self):
        return define()

"""

CAUGHT_BY = {
    "ClaimsWithoutALock": ["a_dozen_workers_have_each_trial_once[short]"],
    "TakesResultsOfAnyToken": [
        "a_lease_that_is_over_frees_its_trial",
        "a_superseded_run_is_kept_and_decides_nothing",
        "a_worker_that_was_stopped_comes_too_late[while_it_runs]",
    ],
    "ChangesFinalResults": ["a_lease_that_is_over_frees_its_trial"],
    "DropsAResultOnceTheLeaseIsOver": [
        "a_late_result_counts_while_nobody_else_has_the_trial",
    ],
    "BeginsTokensAnewAfterAFailure": ["a_trial_whose_runs_fail_is_broken"],
    "KeepsTheTokenOfALostTrial": [
        "a_lease_that_is_over_frees_its_trial",
        "killed_and_stopped_workers_lose_no_trial[short]",
    ],
    "KnowsNoRequests": [
        "a_claim_that_is_asked_for_again_is_the_same",
        "entries_are_numbered_without_gaps",
        "nobody_sees_an_entry_before_one_of_a_lower_number[short]",
    ],
    "AnswersARequestWithWhatSomebodyElseHolds": ["a_claim_that_is_asked_for_again_is_the_same"],
    "KnowsNoKeys": [
        "trials_are_added_once_for_each_key",
        "trials_that_a_dozen_add_are_those_of_the_first[short]",
    ],
    "AddsTrialsOneByOne": ["trials_are_added_once_for_each_key"],
    "NumbersEntriesBySequence": ["nobody_sees_an_entry_before_one_of_a_lower_number[short]"],
    "LeavesGapsBetweenEntries": ["entries_are_numbered_without_gaps"],
    "LetsEntriesOfOthersBetween": ["nobody_sees_an_entry_before_one_of_a_lower_number[short]"],
    "RenewsNoLease": ["a_lease_is_renewed_by_its_holder"],
    "BelievesTheClocksOfWorkers": [
        "the_clock_of_a_worker_decides_nothing[behind]",
        "the_clock_of_a_worker_decides_nothing[ahead]",
    ],
    "JudgesWorkersByTheirHeartbeats": ["the_clock_of_a_worker_decides_nothing[behind]"],
    "ForgetsLostTrials": ["a_lease_that_is_over_frees_its_trial"],
    "WaitsForEveryLease": ["a_process_that_has_ended_frees_its_trial_at_once"],
    "LooksAtProcessesOfOtherMachines": ["a_process_that_has_ended_frees_its_trial_at_once"],
    "NeverGivesUpATrial": ["a_trial_that_is_lost_again_and_again_is_broken"],
    "TriesFailedTrialsForEver": ["a_trial_whose_runs_fail_is_broken"],
    "AppliesAStatusAgain": ["the_end_of_a_run_settles_its_trial[failed]"],
    "CountsAFailureAsOftenAsItIsTold": ["a_failure_that_is_told_again_is_counted_once"],
    "DropsLateScores": ["a_score_that_comes_after_the_end_of_the_run_is_taken"],
    "GivesTrialsOfPausedSweeps": ["paused_and_cancelled_sweeps_give_nothing"],
    "CancelsRunningTrials": ["paused_and_cancelled_sweeps_give_nothing"],
    "TakesAnyDefinition": ["a_sweep_is_the_same_for_all_who_open_it"],
    "IgnoresTheNumberOfAWish": ["a_wish_is_heeded"],
    "IgnoresTheSearchOfAWish": ["a_wish_is_heeded"],
    "GivesTheNewestFirst": ["each_claim_gets_another_trial"],
    "ComparesAndSetsInTwoSteps": ["a_field_that_a_dozen_raise_loses_no_step[short]"],
    "SetsWithoutComparing": ["fields_are_compared_and_set"],
    "RefusesLateRuns": ["a_superseded_run_is_kept_and_decides_nothing"],
}
LIMITS = {
    "Sound": "TIME_LIMIT_S = 60",
    # What waits for something that never comes: for how long.
    "ForgetsLostTrials": "TIME_LIMIT_S = 4",
    "KeepsTheTokenOfALostTrial": "TIME_LIMIT_S = 25",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Class -> test -> outcome: the kit's part for the sound store, and the named tests."""
    return run_planted(tmp_path_factory.mktemp("planted"), MODULE, CAUGHT_BY, LIMITS, 880)[1]


def test_every_weakness_has_a_test_that_finds_it():
    assert set(CAUGHT_BY) == set(WEAK)


@pytest.mark.long
def test_the_sound_store_passes(outcomes):
    found = outcomes["Sound"]
    assert set(found.values()) == {"passed"}
    assert {test for tests in CAUGHT_BY.values() for test in tests} <= found.keys()


@pytest.mark.long
@pytest.mark.parametrize("weakness", CAUGHT_BY)
def test_the_weakness_is_found(outcomes, weakness):
    expected, found = name_failing(CAUGHT_BY, outcomes, weakness)
    assert found == expected
