"""What every part of the conformance kit rests on: what an author gives, and how it is opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import pytest

from quark_core.artifacts.contract import SupportsArtifacts
from quark_core.backend import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Capability,
    SupportsGenerations,
    SupportsGroups,
    SupportsPrimary,
    SupportsRead,
    SupportsReplay,
    SupportsSearch,
    SupportsSeries,
)
from quark_core.capability_check import check_capabilities
from quark_core.keeping import SupportsRemoval
from quark_core.testing.batches import BatchMaker
from quark_core.testing.time_bound import bound_time

__all__ = ["RUN_ID", "BackendKit", "Observation", "Observe", "OldStore", "Opener", "Outage"]

RUN_ID = "run0"
"""The run that the kit's tests write."""

Observation = list[tuple[str, int | None, float]]
"""Metrics as (key, step, value), in the order in which the store has them."""

Observe = Callable[[], Observation]
Opener = Callable[..., Backend]
"""Opens the backend; keywords replace fields of its configuration."""

Outage = Callable[[], AbstractContextManager[object]]

_PROTOCOLS: Mapping[Capability, type] = {
    Capability.PRIMARY: SupportsPrimary,
    Capability.READ: SupportsRead,
    Capability.GROUPS: SupportsGroups,
    Capability.REPLAY: SupportsReplay,
    Capability.SERIES: SupportsSeries,
    Capability.SEARCH: SupportsSearch,
    Capability.GENERATIONS: SupportsGenerations,
    Capability.ARTIFACTS: SupportsArtifacts,
    Capability.REMOVAL: SupportsRemoval,
}


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
    """How long one test may take, its processes included."""
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
    def _time_bound(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with bound_time(self.TIME_LIMIT_S, request.node.name):
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

    def _find_expectation(self, request: pytest.FixtureRequest) -> str | None:
        """Why a test is expected to fail, or None."""
        name: str = request.node.name
        return self.EXPECTED_FAILURES.get(name) or self.EXPECTED_FAILURES.get(name.split("[")[0])

    def _need(self, definition: BackendDefinition, capability: Capability) -> None:
        if capability not in definition.capabilities:
            pytest.skip(f"{definition.name} does not declare {capability}")

    def _open_as(
        self, definition: BackendDefinition, open_backend: Opener, capability: Capability
    ) -> Any:
        """The backend opened, where it declares a capability; else the test is skipped."""
        self._need(definition, capability)
        backend = open_backend()
        assert isinstance(backend, _PROTOCOLS.get(capability, Backend))
        return backend
