"""The base of the conformance kit: an author's input, and how a backend is opened."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar, TypeVar

import pytest

from quark_core.backends.contract import Backend, BackendConfig, BackendDefinition, Capability
from quark_core.backends.registry import PROTOCOLS, check_capabilities
from quark_core.errors import SchemaValidationError
from quark_core.testing.fakes import BatchMaker

TIMEOUT_FACTOR = "QUARK_KIT_TIMEOUT_FACTOR"


def stretch_s(limit_s: float) -> float:
    """A time limit of the kit, as the environment wants it.

    Raises:
        SchemaValidationError: The factor is not a positive number.
    """
    text = os.environ.get(TIMEOUT_FACTOR, "").strip()
    if not text:
        return limit_s
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not (factor > 0 and math.isfinite(factor)):
        raise SchemaValidationError(f"{TIMEOUT_FACTOR} must be a positive number, got {text!r:.40}")
    return limit_s * factor


_LONG_TIMES = 4


@contextmanager
def bound_time(limit_s: float, what: str) -> Iterator[None]:
    """Fail what takes longer than a limit, also where it hangs in C code that can be interrupted.

    QUARK_KIT_TIMEOUT_FACTOR stretches the limit. By the alarm clock of the main thread;
    where there is none (Windows, another thread) nothing is bounded. A clock
    that runs already, such as pytest-timeout's, goes on afterwards.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    limit_s = stretch_s(limit_s)

    def fail(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"{what} took longer than {limit_s:g} s")

    earlier_handler = signal.signal(signal.SIGALRM, fail)
    # It rings again, since the backend may hang a second time when it is closed after the test.
    earlier_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, earlier_handler)
        if earlier_s:
            left_s = max(1e-3, earlier_s - (time.monotonic() - began))
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


RUN_ID = "run0"
"""The run that the kit's tests write."""

Observation = list[tuple[str, int | None, float]]
"""Metrics as (key, step, value), in the order in which the store has them."""

Observe = Callable[[], Observation]
Opener = Callable[..., Backend]
"""Opens the backend; keywords replace fields of its configuration."""

Outage = Callable[[], AbstractContextManager[object]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OldStore:
    """A store that an earlier version of the backend wrote.

    Attributes:
        version: What wrote it, for the test's name in a report.
        config: Opens a copy of it, which the test may change.
        run_id: A run in it.
        metrics: What that run has; in persistence order within each key.
    """

    version: str
    config: BackendConfig
    run_id: str
    metrics: Observation


_Test = TypeVar("_Test", bound=Callable[..., None])


def needs(capability: Capability) -> Callable[[_Test], _Test]:
    """A test of backends that declare a capability; it is skipped for others."""

    def mark(test: _Test) -> _Test:
        vars(test)["needs"] = capability
        return test

    return mark


def find_need(request: pytest.FixtureRequest) -> Capability | None:
    """The capability that a test needs, or None."""
    need: Capability | None = getattr(request.function, "needs", None)
    return need


class BackendKit:
    """The fixtures of the kit; an author overrides those of the first half."""

    TITLE: ClassVar[str] = ""
    """What reports call the backend; the name of the class, where it is empty."""
    RUN_ID: ClassVar[str] = RUN_ID
    """The run that `observe` must return the metrics of."""
    EXPECTED_FAILURES: ClassVar[Mapping[str, str]] = {}
    """Tests that the backend cannot pass, by name, each with the reason. A test with
    parameters is named with or without them: `test_a_kind_is_read_back[layer]`."""
    TIME_LIMIT_S: ClassVar[float] = 60.0
    """How long one test may take, its processes included; one called `[long]` four times that."""
    CLOSE_LIMIT_S: ClassVar[float] = 10.0
    """How long `close` may take with nothing left to send."""

    @pytest.fixture
    def definition(self) -> BackendDefinition:
        """The backend's definition.

        Its `open` must be a function of a module, not a closure, so that other
        processes can open the backend too.
        """
        pytest.fail("override the fixture `definition`")

    @pytest.fixture
    def config(self) -> BackendConfig:
        """What opens an empty store, for the run `RUN_ID`."""
        pytest.fail("override the fixture `config`")

    @pytest.fixture
    def observe(self) -> Observe:
        """Reads the store WITHOUT the backend: every metric of the run `RUN_ID`."""
        pytest.fail("override the fixture `observe`")

    @pytest.fixture
    def outage(self) -> Outage | None:
        """Makes the store unreachable: returns a context manager, within which it is.

        None, the default, skips what needs it.
        """
        return None

    @pytest.fixture
    def old_stores(self) -> Sequence[OldStore]:
        """Stores that earlier versions of the backend wrote; none by default."""
        return ()

    # What the tests use.

    @pytest.fixture(autouse=True)
    def _apply_expectations(self, request: pytest.FixtureRequest) -> None:
        reason = self._find_expectation(request)
        if reason is not None:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.fixture(autouse=True)
    def _skip_undeclared(
        self, request: pytest.FixtureRequest, definition: BackendDefinition
    ) -> None:
        need = find_need(request)
        if need is not None and need not in definition.capabilities:
            pytest.skip(f"{definition.name} does not declare {need}")

    @pytest.fixture(autouse=True)
    def _time_bound(self, request: pytest.FixtureRequest) -> Iterator[None]:
        is_long = request.node.name.endswith("[long]")
        limit_s = self.TIME_LIMIT_S * (_LONG_TIMES if is_long else 1)
        with bound_time(limit_s, request.node.name):
            yield

    @pytest.fixture
    def open_backend(
        self,
        request: pytest.FixtureRequest,
        definition: BackendDefinition,
        config: BackendConfig,
        _time_bound: None,
    ) -> Iterator[Opener]:
        """Opens the backend, as often as wanted; what is left open is closed afterwards."""
        opened: list[Backend] = []

        def open_it(**changes: Any) -> Backend:
            if "run_id" in changes and config.run_path is not None:
                # It is a folder of the run's own, so another run has another.
                other = changes["run_id"] or self.RUN_ID
                changes.setdefault("run_path", config.run_path.with_name(other))
            changed = dataclasses.replace(config, **changes)
            backend = check_capabilities(definition, definition.open(changed))
            opened.append(backend)
            return backend

        yield open_it
        # A test that is expected to fail may leave what cannot be closed any more.
        forgiven = (Exception,) if self._find_expectation(request) else ()
        for backend in opened:
            with suppress(*forgiven):
                backend.close()

    @pytest.fixture
    def maker(self) -> BatchMaker:
        """The first writer of the run."""
        return BatchMaker(self.RUN_ID)

    @pytest.fixture
    def opened(self, request: pytest.FixtureRequest, open_backend: Opener) -> Any:
        """The backend opened, with what the test needs of it."""
        backend, need = open_backend(), find_need(request)
        assert need is None or isinstance(backend, PROTOCOLS.get(need, Backend))
        return backend

    @pytest.fixture
    def backend(self, opened: Any, maker: BatchMaker) -> Any:
        """The backend opened, with the start of `maker`'s run written."""
        opened.write(maker.start())
        return opened

    def _find_expectation(self, request: pytest.FixtureRequest) -> str | None:
        """Why a test is expected to fail, or None."""
        name: str = request.node.name
        return self.EXPECTED_FAILURES.get(name) or self.EXPECTED_FAILURES.get(name.split("[")[0])
