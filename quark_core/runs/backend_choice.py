"""Which backends a run asks for: names and URIs in, definitions and places out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote_plus

from quark_core.backends.contract import BackendConfig, BackendDefinition, Capability, RankPolicy
from quark_core.backends.registry import BackendRegistry, default_registry
from quark_core.config import settings
from quark_core.config.redaction import redact_text
from quark_core.errors import SchemaValidationError, SessionStoreError, UnknownBackendError
from quark_core.hosting.opener import refuse_hidden
from quark_core.ranks.choice import ALL_RANKS, RANK_ZERO, RankChoice, parse_ranks
from quark_core.ranks.launches import RankInfo

_SPECIFICATION = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_.-]*)(?:(?P<mark>[+:])(?P<rest>.*))?")
_KEEP_NOTHING = "none"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """One backend that was asked for: what, where, how it was written, and on which ranks."""

    definition: BackendDefinition
    location: str
    options: tuple[tuple[str, str], ...]
    specification: str
    ranks: RankChoice | None = None

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
    """The backends of one run on this rank; none of them is open yet.

    Attributes:
        primary: The primary store; None where it is not for this rank.
        mirrors: The others that are for this rank.
        ranks: On which ranks the primary is; None where nothing is kept on any.
    """

    primary: BackendChoice | None
    mirrors: tuple[BackendChoice, ...]
    ranks: RankChoice | None = None

    @property
    def choices(self) -> tuple[BackendChoice, ...]:
        """All of them, the primary first."""
        return (*([self.primary] if self.primary else []), *self.mirrors)

    @property
    def specifications(self) -> tuple[str, ...]:
        """How to ask for the same backends again, the primary first, without secrets."""
        return tuple(redact_text(choice.specification) for choice in self.choices)


def plan_backends(
    backends: str | Sequence[str] | None,
    rank: RankInfo,
    registry: BackendRegistry | None = None,
    *,
    ranks: RankChoice | None = None,
) -> Plan:
    """Decide once which backends this rank has.

    Args:
        backends: Names or URIs of what is added, as a list or separated by
            commas; None takes QUARK_BACKENDS. "none" keeps nothing.
        rank: Place of this process; a backend that is not for this rank does
            not exist here.
        registry: Installed backends.
        ranks: The ranks of the session, where it says; a backend's own URI
            wins, then this, then what the backend declares.

    Raises:
        UnknownBackendError: A name or scheme that nothing answers to, or "none" beside others.
        BackendContractError: A named plugin that was left out, or one that is to have
            a process of its own and that no other process can find.
        SchemaValidationError: `backends` is of a wrong type, or names two primaries.
        SessionStoreError: QUARK_REQUIRE_SERVICE is set and QUARK_PERSISTENCE_URL
            is not, or the latter is the URL of nothing.
    """
    registry = registry or default_registry()
    wanted = _split(backends)
    if wanted == [_KEEP_NOTHING]:
        return Plan(None, ())
    if _KEEP_NOTHING in wanted:
        others = ", ".join(text for text in wanted if text != _KEEP_NOTHING)
        raise UnknownBackendError(
            f"backends: {_KEEP_NOTHING!r} keeps nothing and stands alone; leave it out, or {others}"
        )
    chosen = [choose_backend(text, registry) for text in wanted]
    choices = list({(c.definition.name, c.location, c.options): c for c in chosen}.values())
    primaries = [c for c in choices if Capability.PRIMARY in c.definition.capabilities]
    if len(primaries) > 1:
        names = " and ".join(choice.definition.name for choice in primaries)
        raise SchemaValidationError(f"backends: {names} are both primary stores; name one")
    primary = primaries[0] if primaries else choose_primary(registry)
    mirrors = [choice for choice in choices if choice is not primary]

    kept = primary.ranks or ranks
    if kept is None and primary.definition.rank_policy is RankPolicy.ALL:
        kept = ALL_RANKS
    kept = kept or RANK_ZERO

    if settings.uses_helpers():
        for choice in choices:
            refuse_hidden(choice.definition)

    def is_here(choice: BackendChoice) -> bool:
        policy = choice.definition.rank_policy
        if choice.ranks is not None:
            return choice.ranks.includes(rank.rank)
        if policy is RankPolicy.ALL:
            return ranks is None or ranks.includes(rank.rank)
        return rank.rank == kept.leader or (
            policy is RankPolicy.SESSION and kept.includes(rank.rank)
        )

    return Plan(
        primary if kept.includes(rank.rank) else None,
        tuple(choice for choice in mirrors if is_here(choice)),
        kept,
    )


def choose_primary(registry: BackendRegistry) -> BackendChoice:
    """The store that runs go to where nobody says otherwise.

    Raises:
        SessionStoreError: QUARK_REQUIRE_SERVICE is set and QUARK_PERSISTENCE_URL
            is not, or the latter is the URL of nothing.
    """
    url = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    if url:
        try:
            return choose_backend(url, registry)
        except UnknownBackendError as error:
            shown = redact_text(url)
            raise SessionStoreError(
                f"{settings.PERSISTENCE_URL} is no URL of a Quark service: {shown[:100]!r}; "
                f"give it with its scheme, such as https://quark.example.org ({error})"
            ) from None
    if settings.requires_service():
        raise SessionStoreError(
            f"{settings.REQUIRE_SERVICE} is set but {settings.PERSISTENCE_URL} is not: "
            "set it to the URL of your Quark service"
        )
    return choose_backend(registry.find_default_primary().name, registry)


def _split(backends: str | Sequence[str] | None) -> list[str]:
    if backends is None:
        backends = os.environ.get(settings.BACKENDS, "")
    if isinstance(backends, str):
        backends = backends.split(",")
    if not isinstance(backends, Sequence) or not all(isinstance(b, str) for b in backends):
        raise SchemaValidationError("backends must be a str or a sequence of str")
    return [text.strip() for text in backends if text.strip()]


def choose_backend(text: str, registry: BackendRegistry) -> BackendChoice:
    """The backend that a name or URI asks for.

    Raises:
        UnknownBackendError: Nothing installed answers to it.
        BackendContractError: A named plugin that was left out.
    """
    match = _SPECIFICATION.fullmatch(text)
    if match is None:
        raise UnknownBackendError(
            f"backends: {text!r} is neither a name nor a URI "
            f"(installed: {', '.join(registry.names)})"
        )
    name, mark = match["name"].lower(), match["mark"]
    definition = registry.find(name)
    rest, ranks = _take_ranks(match["rest"] or "")
    if name != definition.name and mark == ":":
        # The scheme is the location's own, such as https.
        return BackendChoice(definition, f"{match['name']}:{rest}", (), text, ranks)
    if mark == "+":
        # What follows is a URI of another kind, and its other parameters are its own.
        return BackendChoice(definition, rest, (), text, ranks)
    location, _, parameters = rest.partition("?")
    options = tuple(parse_qsl(parameters, keep_blank_values=True))
    return BackendChoice(definition, location.removeprefix("//"), options, text, ranks)


def _take_ranks(rest: str) -> tuple[str, RankChoice | None]:
    """A URI without its parameter `ranks`, which is ours whatever the URI is, and its ranks."""
    location, mark, parameters = rest.partition("?")
    parts = parameters.split("&")
    found = [part for part in parts if part.startswith("ranks=")]
    if not mark or not found:
        return rest, None
    others = "&".join(part for part in parts if part not in found)
    ranks = parse_ranks(unquote_plus(found[-1].removeprefix("ranks=")), "backends: ranks")
    return f"{location}?{others}" if others else location, ranks
