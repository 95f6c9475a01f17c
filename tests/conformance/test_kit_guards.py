"""The kit is not weakened silently: no test is removed, overridden or excused without a reason."""

import pickle
import signal
import threading
import time

import pytest
from planted_backends import define

from quark_core.backends.contract import BackendConfig, BackendDefinition
from quark_core.errors import SchemaValidationError
from quark_core.testing.conformance import BackendConformance
from quark_core.testing.kit import bound_time, stretch_s
from quark_core.testing.process_conformance import WritingProcess


def make(**members):
    return type("Weakened", (BackendConformance,), members)


def test_a_standard_test_is_not_overridden():
    with pytest.raises(TypeError, match="overrides the standard test test_values_are_kept_exactly"):
        make(test_values_are_kept_exactly=lambda self: None)


def test_a_standard_test_is_not_removed():
    with pytest.raises(TypeError, match="overrides the standard test test_close_ends_in_time"):
        make(test_close_ends_in_time=None)


def test_a_standard_test_may_be_overridden_with_a_reason():
    @pytest.mark.xfail(reason="the store has no infinity")
    def test_values_are_kept_exactly(self):
        raise AssertionError

    make(test_values_are_kept_exactly=test_values_are_kept_exactly)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"test_of_nothing": "why"}, "the test test_of_nothing does not exist"),
        ({"test_filters[limit]": " "}, "test_filters.limit. requires a reason"),
    ],
)
def test_an_expectation_names_a_test_and_a_reason(expected, message):
    with pytest.raises(TypeError, match=message):
        make(EXPECTED_FAILURES=expected)


def test_a_definition_that_other_processes_cannot_open_says_so(tmp_path):
    closed_over = BackendDefinition(name="local", summary="s", open=lambda config: None)
    with pytest.raises(pytest.fail.Exception, match="must be a function of a module"):
        WritingProcess(tmp_path, closed_over, BackendConfig(storage_dir=tmp_path), [])
    assert pickle.dumps(define("Sound"))


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="bounded by the alarm clock")
@pytest.mark.parametrize(("factor", "limit"), [("10", "0.5"), ("0.5", "0.025")])
def test_a_variable_stretches_the_limits(monkeypatch, factor, limit):
    monkeypatch.setenv("QUARK_KIT_TIMEOUT_FACTOR", factor)
    with (
        pytest.raises(pytest.fail.Exception, match=rf"close\(\) took longer than {limit} s"),
        bound_time(0.05, "close()"),
    ):
        threading.Event().wait(60)


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "long"])
def test_a_factor_that_is_none_is_refused_by_its_name(monkeypatch, factor):
    monkeypatch.setenv("QUARK_KIT_TIMEOUT_FACTOR", factor)
    with pytest.raises(SchemaValidationError, match=r"^QUARK_KIT_TIMEOUT_FACTOR must be"):
        stretch_s(1.0)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="bounded by the alarm clock")
def test_a_hang_is_ended_and_an_earlier_clock_goes_on():
    rung = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append("earlier"))
    before = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with (
            pytest.raises(pytest.fail.Exception, match=r"close\(\) took longer than 0.05 s"),
            bound_time(0.05, "close()"),
        ):
            threading.Event().wait(60)
        deadline = time.monotonic() + 30
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rung == ["earlier"]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
