"""The composition root: settings and registry in, the backends of one run out.

It knows backends only through their definitions, so it imports none.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl

from quark_core import settings
from quark_core.backend import (
    Backend,
    BackendConfig,
    BackendDefinition,
    Capability,
    RankPolicy,
    RunLocation,
    SupportsPrimary,
    check_capabilities,
)
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.lane import Lane, RetryPolicy
from quark_core.delivery.quarantine import Quarantine
from quark_core.errors import SchemaValidationError, SessionStoreError, UnknownBackendError
from quark_core.ranks import RankInfo
from quark_core.redaction import redact_text
from quark_core.registry import BackendRegistry, default_registry

__all__ = ["BackendChoice", "Plan", "open_primary", "open_reader", "plan_backends"]

_SPECIFICATION = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_.-]*)(?:(?P<mark>[+:])(?P<rest>.*))?")
_DEFAULT_PRIMARY = "embedded"
_KEEP_NOTHING = "none"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One backend that was asked for: what, where, and how it was written."""

    definition: BackendDefinition
    location: str
    options: tuple[tuple[str, str], ...]
    specification: str

    def configure(
        self, storage_dir: Path, *, run_id: str | None = None, project: str | None = None
    ) -> BackendConfig:
        """The configuration that the backend is opened with."""
        return BackendConfig(
            storage_dir=storage_dir,
            run_id=run_id,
            project=project,
            location=self.location,
            options=dict(self.options),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The backends of one run on this rank; none of them is open yet."""

    primary: BackendChoice | None
    mirrors: tuple[BackendChoice, ...]

    @property
    def specifications(self) -> tuple[str, ...]:
        """How to ask for the same backends again, the primary first, without secrets."""
        choices = ([self.primary] if self.primary else []) + list(self.mirrors)
        return tuple(redact_text(choice.specification) for choice in choices)


def plan_backends(
    backends: str | Sequence[str] | None,
    rank: RankInfo,
    registry: BackendRegistry | None = None,
) -> Plan:
    """Decide once which backends this rank has.

    Args:
        backends: Names or URIs of what is added, as a list or separated by
            commas; None takes QUARK_BACKENDS. "none" keeps nothing.
        rank: Place of this process; a backend that is not for this rank does
            not exist here.
        registry: Installed backends.

    Raises:
        UnknownBackendError: A name or scheme that nothing answers to.
        BackendContractError: A named plugin that was left out.
        SchemaValidationError: `backends` is of a wrong type, or names two primaries.
        SessionStoreError: QUARK_REQUIRE_SERVICE is set and QUARK_PERSISTENCE_URL is not.
    """
    registry = registry or default_registry()
    wanted = _split(backends)
    if wanted == [_KEEP_NOTHING]:
        return Plan(None, ())
    chosen = [_choose(text, registry) for text in wanted]
    choices = list({(c.definition.name, c.location, c.options): c for c in chosen}.values())
    primaries = [c for c in choices if Capability.PRIMARY in c.definition.capabilities]
    if len(primaries) > 1:
        names = " and ".join(choice.definition.name for choice in primaries)
        raise SchemaValidationError(f"backends: {names} are both primary stores; name one")
    primary = primaries[0] if primaries else _choose(_default_primary(), registry)
    mirrors = [choice for choice in choices if choice is not primary]

    def is_here(choice: BackendChoice) -> bool:
        return rank.rank == 0 or choice.definition.rank_policy is RankPolicy.ALL

    return Plan(
        primary if is_here(primary) else None,
        tuple(choice for choice in mirrors if is_here(choice)),
    )


def open_primary(choice: BackendChoice, config: BackendConfig) -> SupportsPrimary:
    """Open a primary store and hold it to what it declares.

    Raises:
        SessionStoreError: It cannot be opened.
        BackendContractError: It does not do what it declares.
    """
    backend = _open(choice.definition, config)
    assert isinstance(backend, SupportsPrimary)
    return backend


def open_reader(
    storage_dir: Path, registry: BackendRegistry | None = None, specification: str | None = None
) -> SupportsPrimary:
    """Open the primary store of a storage root for reading only.

    Raises:
        SessionStoreError: There is no store, or it cannot be read.
    """
    registry = registry or default_registry()
    choice = _choose(specification or _default_primary(), registry)
    config = replace(choice.configure(storage_dir), read_only=True)
    return open_primary(choice, config)


def make_lanes(
    plan: Plan,
    primary: SupportsPrimary | None,
    config: BackendConfig,
    log: BatchLog,
    run_path: Path,
    *,
    on_primary_failure: object = None,
    retry: RetryPolicy | None = None,
) -> list[Lane]:
    """One lane per backend, the primary's first; mirrors open on their lane's thread."""
    lanes: list[Lane] = []
    choices = [*([plan.primary] if plan.primary else []), *plan.mirrors]
    names = Counter(choice.definition.name for choice in choices)

    def add(choice: BackendChoice, opened: Backend | None) -> None:
        definition = choice.definition
        name = definition.name
        if names[name] > 1:
            # Two mirrors of one kind: only what the user wrote tells them apart.
            name = redact_text(choice.specification)
        its_config = replace(
            config, location=choice.location, options=dict(choice.options), run_path=run_path
        )
        lanes.append(
            Lane(
                name,
                lambda: opened if opened is not None else _open(definition, its_config),
                log.open_cursor(),
                Quarantine(run_path / "quarantine" / _as_folder(name), name),
                primary=opened is not None,
                idempotent=Capability.IDEMPOTENT in definition.capabilities,
                retry=retry,
                on_failure=on_primary_failure if opened is not None else None,  # type: ignore[arg-type]
            )
        )

    if plan.primary is not None:
        add(plan.primary, primary)
    for mirror in plan.mirrors:
        add(mirror, None)
    return lanes


def locate_run(primary: SupportsPrimary | None, storage_dir: Path, run_id: str) -> RunLocation:
    """Where a run lies; under the storage root where there is no primary to ask."""
    if primary is not None:
        return primary.locate(run_id)
    root = storage_dir / ".quark"
    return RunLocation(store_root=root, db_path=None, run_path=str(root / "runs" / run_id))


def _as_folder(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _open(definition: BackendDefinition, config: BackendConfig) -> Backend:
    return check_capabilities(definition, definition.open(config))


def _default_primary() -> str:
    url = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    if url:
        return url
    if os.environ.get(settings.REQUIRE_SERVICE, "").strip() not in ("", "0"):
        raise SessionStoreError(
            f"{settings.REQUIRE_SERVICE} is set but {settings.PERSISTENCE_URL} is not: "
            "set it to the URL of your Quark service"
        )
    return _DEFAULT_PRIMARY


def _split(backends: str | Sequence[str] | None) -> list[str]:
    if backends is None:
        backends = os.environ.get(settings.BACKENDS, "")
    if isinstance(backends, str):
        backends = backends.split(",")
    if not isinstance(backends, Sequence) or not all(isinstance(b, str) for b in backends):
        raise SchemaValidationError("backends must be a str or a sequence of str")
    return [text.strip() for text in backends if text.strip()]


def _choose(text: str, registry: BackendRegistry) -> BackendChoice:
    match = _SPECIFICATION.fullmatch(text)
    if match is None:
        raise UnknownBackendError(
            f"backends: {text!r} is neither a name nor a URI "
            f"(installed: {', '.join(registry.names)})"
        )
    name, mark, rest = match["name"].lower(), match["mark"], match["rest"] or ""
    definition = registry.find(name)
    if name != definition.name and mark == ":":
        # The scheme is the location's own, such as https.
        return BackendChoice(definition, text, (), text)
    if mark == "+":
        # What follows is a URI of another kind, and its parameters are its own.
        return BackendChoice(definition, rest, (), text)
    location, _, parameters = rest.partition("?")
    options = tuple(parse_qsl(parameters, keep_blank_values=True))
    return BackendChoice(definition, location.removeprefix("//"), options, text)
