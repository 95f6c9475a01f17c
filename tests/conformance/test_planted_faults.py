"""The kit finds each weakness that was planted in a backend, and none in the sound one."""

import pytest
from planted_backends import WEAK
from planted_runs import name_failing, run_planted

# The whole kit is run once, within the first test.
pytestmark = pytest.mark.timeout(600)

MODULE = """
import contextlib

import pytest
from planted_backends import SoundBackend, define, read_lines

from quark_core.backends.contract import BackendConfig
from quark_core.testing.conformance import BackendConformance


class Planted(BackendConformance):
    @pytest.fixture
    def definition(self):
        return define(type(self).__name__.removeprefix("Test"))

    @pytest.fixture
    def observe(self, config):
        path = config.storage_dir / "kept" / f"{self.RUN_ID}.jsonl"

        def read():
            return [
                (record["metric_key"], record["step"], record["value"])
                for line in read_lines(path)
                if line["kind"] == "metric" and line["run_id"] == self.RUN_ID
                for record in line["records"]
            ]

        return read

    @pytest.fixture
    def outage(self, config):
        folder = config.storage_dir / "kept"

        @contextlib.contextmanager
        def take_away():
            folder.rename(folder.with_name("aside"))
            folder.write_text("in the way")
            yield
            folder.unlink()
            folder.with_name("aside").rename(folder)

        return take_away
"""

CAUGHT_BY = {
    "LosesTheLastBatchOnClose": ["a_written_batch_is_in_the_store"],
    "AcknowledgesBeforeWriting": ["a_written_batch_is_in_the_store"],
    "WritesOnClose": [
        "a_written_batch_is_in_the_store",
        "a_killed_process_loses_nothing_acknowledged",
    ],
    "StoresTwice": [
        "a_batch_delivered_twice_is_there_once",
        "a_reply_lost_by_a_crash_duplicates_nothing",
        "old_batches_that_come_late_are_there_once",
    ],
    "ForgetsWhatItHadWhenItIsOpened": ["a_reply_lost_by_a_crash_duplicates_nothing"],
    "TellsDuplicatesByContent": ["equal_values_are_no_duplicates"],
    "TakesOtherContentUnderAKnownNumber": ["other_content_under_a_known_number_is_rejected"],
    "SwallowsErrors": ["malformed_bytes_are_rejected", "an_outage_is_said_to_be_one"],
    "CallsEveryErrorARefusal": ["an_outage_is_said_to_be_one"],
    "LetsItsErrorsOut": ["an_outage_is_said_to_be_one"],
    "ReordersRecords": ["a_written_batch_is_in_the_store", "a_large_batch_is_kept_whole"],
    "MergesBySteps": ["steps_may_repeat_and_go_backwards"],
    "RoundsFloats": ["values_are_kept_exactly", "finite_values_are_kept_exactly"],
    "DropsNan": ["values_are_kept_exactly"],
    "KeepsStepsAsFloats": ["steps_are_whole_to_the_last_bit"],
    "FoldsTheCaseOfNames": ["odd_names_are_kept_apart"],
    "CutsLongTexts": ["odd_texts_are_kept[long]"],
    "DropsMetadata": ["records_are_read_as_they_were_written", "a_kind_is_read_back[layer]"],
    "MixesRuns": ["runs_are_kept_apart"],
    "StumblesOverKinds": ["a_kind_is_taken[layer]", "a_kind_of_a_later_version_stops_nothing"],
    "KnowsOneWriterOnly": [
        "another_writer_of_an_attempt_is_taken",
        "two_processes_write_one_run",
    ],
    "RefusesGaps": ["a_gap_in_the_numbers_is_accepted"],
    "IsNotSafeFromAKill": ["a_killed_process_loses_nothing_acknowledged"],
    "RewritesTheFile": ["two_processes_write_one_run"],
    "HangsInClose": ["close_ends_in_time"],
    "LeavesAThread": ["close_ends_in_time"],
    "ExitsInWrite": ["a_written_batch_is_in_the_store"],
    "ReadsWhatIsUnknownAsEmpty": ["unknown_runs_are_said_to_be_unknown"],
    "IgnoresFilters": ["filters[key]", "filters[limit]"],
    "DeclaresWhatItHasNot": ["capabilities_are_true"],
    "HasWhatItDoesNotDeclare": ["capabilities_are_true"],
    "SpeaksAnOlderVersion": ["definition_is_complete"],
}
LIMITS = {
    "Sound": "TIME_LIMIT_S, CLOSE_LIMIT_S = 60, 30",
    # Never ends: so long it is waited for.
    "HangsInClose": "TIME_LIMIT_S, CLOSE_LIMIT_S = 2, 0.5",
}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """What pytest prints, and its report: the kit for the sound backend, and the named tests."""
    return run_planted(tmp_path_factory.mktemp("planted"), MODULE, CAUGHT_BY, LIMITS, 580)


@pytest.fixture(scope="module")
def outcomes(session):
    """Class -> test -> outcome."""
    return session[1]


def test_every_weakness_has_a_test_that_finds_it():
    assert set(CAUGHT_BY) == set(WEAK)


@pytest.mark.long
def test_the_sound_backend_passes(outcomes):
    failed = {name for name, outcome in outcomes["Sound"].items() if outcome == "failed"}
    assert failed == set()
    assert list(outcomes["Sound"].values()).count("passed") > 60
    for test in {test for tests in CAUGHT_BY.values() for test in tests}:
        assert outcomes["Sound"][test] == "passed", test


@pytest.mark.long
@pytest.mark.parametrize("weakness", CAUGHT_BY)
def test_the_weakness_is_found(outcomes, weakness):
    expected, found = name_failing(CAUGHT_BY, outcomes, weakness)
    assert found == expected


@pytest.mark.long
def test_the_report_is_a_table_for_each_backend(session):
    text, found = session
    sections = text.split(" conformance of ")
    assert len(sections) == 1 + len(found)
    (sound,) = [section for section in sections if section.startswith("TestSound ")]
    lines = [" ".join(line.split()) for line in sound.splitlines()]
    assert lines[1].startswith("TestSound: ")
    assert "test_close_ends_in_time passed" in lines
    assert "test_one_attempt_is_started_once skipped planted does not declare primary" in lines
    (weak,) = [section for section in sections if section.startswith("TestDropsNan ")]
    assert "TestDropsNan: 1 failed" in weak
