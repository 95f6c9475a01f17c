"""API keys and page sessions: created, checked, limited, listed and revoked."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.config import ANY_SCOPE, Limits, Principal, Scope
from quark_backends.service.server.deployment import ControlDatabase, PageSession, StoredKey
from quark_backends.service.server.requests import WorkThreads
from quark_backends.service.server.responses import ServiceFailure
from quark_core.errors import QuarkError, SchemaValidationError
from quark_core.records.base import now_us

# Keys: how they are made, checked and limited.
#
# A key is `qk_<id>_<secret>`. The id finds it; of the secret, 32 random bytes,
# only the SHA-256 is kept.

SCOPES = ("read", "ingest", "write", "admin")
"""What a key may allow; admin implies the others."""

_log = logging.getLogger("quark.service")

_PREFIX = "qk"
_NO_DIGEST = hashlib.sha256(b"").hexdigest()
_NOTHING = "-"
_REMEMBERED = 10_000
_NOTE_USE_S = 300.0
_BURST = 10.0
MICROSECONDS = 1_000_000
_MAX_NAME = 200

SESSION_S = 12 * 3600
"""How long a login to the page lasts, unless its key ends before."""


def check_scopes(scopes: Iterable[str]) -> frozenset[Scope]:
    """Scopes that a key can have.

    Raises:
        SchemaValidationError: None, or an unknown one.
    """
    found = frozenset(scopes)
    unknown = sorted(found.difference(SCOPES))
    if not found or unknown:
        raise SchemaValidationError(
            f"scopes must be one or more of {', '.join(map(repr, SCOPES))}"
            + (f", not {unknown[0]!r:.60}" if unknown else "")
        )
    return found


def make_key(
    control: ControlDatabase,
    *,
    workspace: str,
    name: str,
    scopes: Iterable[str],
    expires_us: int | None = None,
) -> tuple[str, StoredKey]:
    """Make a key; returns it, which nobody can tell again, and what is kept of it.

    Raises:
        SchemaValidationError: A name or scopes that no key can have.
        SessionStoreError: It cannot be kept.
    """
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise SchemaValidationError(f"name must be 1 to {_MAX_NAME} printable characters")
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    stored = StoredKey(
        id=key_id,
        workspace=workspace,
        name=name,
        digest=_digest(secret),
        scopes=check_scopes(scopes),
        created_us=now_us(),
        expires_us=expires_us,
    )
    control.add_key(stored)
    return f"{_PREFIX}_{key_id}_{secret}", stored


def rotate_key(
    control: ControlDatabase, old: StoredKey, *, overlap_s: float
) -> tuple[str, StoredKey]:
    """Make a key like another one, which lives on for a time, so that both let in meanwhile.

    Raises:
        SchemaValidationError: The old one is not live any more.
        SessionStoreError: It cannot be kept.
    """
    moment_us = now_us()
    if not old.is_live(moment_us):
        raise SchemaValidationError(
            f"key {old.id} is revoked or expired, so it cannot be rotated. Create a new one"
        )
    made = make_key(
        control,
        workspace=old.workspace,
        name=old.name,
        scopes=old.scopes,
        # A key that was to live for a time is followed by one that lives as long.
        expires_us=None if old.expires_us is None else moment_us + old.expires_us - old.created_us,
    )
    control.end_key(old.id, expires_us=moment_us + int(overlap_s * MICROSECONDS))
    return made


class RateLimit:
    """A bucket that fills at a rate, and holds ten seconds' worth.

    Args:
        per_s: How much may be taken per second, on average.
    """

    __slots__ = ("_filled_at", "_free", "_per_s")

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._free = per_s * _BURST
        self._filled_at = time.monotonic()

    def take(self, amount: float) -> float:
        """Take some; returns 0, or in how many seconds to ask again.

        What is more than the bucket holds is taken once it is not empty.
        """
        moment = time.monotonic()
        self._free = min(
            self._per_s * _BURST, self._free + (moment - self._filled_at) * self._per_s
        )
        self._filled_at = moment
        wanted = min(amount, max(1.0, self._per_s))
        if self._free >= wanted:
            self._free -= amount
            return 0.0
        return (wanted - self._free) / self._per_s


class _Known(msgspec.Struct):
    key: StoredKey
    looked_up_at: float
    requests: RateLimit
    rows: RateLimit


class KeyGuard:
    """Lets in whoever has a key; of one event loop.

    Args:
        control: Where keys are kept.
        threads: Where they are looked up.
        limits: How often a key may ask, over all processes.
        cache_s: How long a key that was looked up is believed in.
        workers: Processes that share the limits.
    """

    def __init__(
        self,
        control: ControlDatabase,
        threads: WorkThreads,
        limits: Limits,
        *,
        cache_s: float,
        workers: int = 1,
    ) -> None:
        self._control = control
        self._threads = threads
        self._cache_s = cache_s
        self._requests_per_s = limits.requests_per_s / workers
        self._rows_per_s = limits.rows_per_s / workers
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._used: dict[str, int] = {}
        self._noted_at = time.monotonic()

    async def admit(self, authorization: str | None, scope: Scope) -> Principal:
        """Whom a key belongs to.

        Raises:
            ServiceFailure: No key, one that is not valid (whyever: nobody is told),
                one that lacks the scope, or one that asks too often.
            SessionStoreError: Keys cannot be looked up now.
        """
        key_id, secret = _parse(authorization)
        digest = _digest(secret)
        known = self._known.get(key_id)
        fresh = known is not None and time.monotonic() - known.looked_up_at < self._cache_s
        if known is None or not fresh or not hmac.compare_digest(digest, known.key.digest):
            # A wrong secret costs a look-up, as an unknown id does.
            known = await self._look_up(key_id)
        expected = known.key.digest if known is not None else _NO_DIGEST
        matches = hmac.compare_digest(digest, expected)
        moment_us = now_us()
        if known is None or not matches or not known.key.is_live(moment_us):
            raise ServiceFailure(
                ErrorCode.UNAUTHORIZED,
                "the API key is missing or not valid. Send `Authorization: Bearer qk_…` with a "
                "key that is neither revoked nor expired",
            )
        found = known.key
        if scope != ANY_SCOPE and not found.scopes & {scope, "admin"}:
            raise ServiceFailure(
                ErrorCode.FORBIDDEN,
                f"the key {found.id} does not have the scope {scope!r}. Its scopes are "
                f"{', '.join(sorted(found.scopes))}",
            )
        if wait_s := known.requests.take(1):
            raise _too_often("requests", self._requests_per_s, wait_s)
        self._used[found.id] = moment_us
        if time.monotonic() - self._noted_at > _NOTE_USE_S:
            await self.note_use()
        return Principal(found.workspace, found.id, found.scopes)

    def spend_rows(self, principal: Principal, rows: int) -> None:
        """Count records that a key sends.

        Raises:
            ServiceFailure: It sends more than it may.
        """
        known = self._known.get(principal.key_id)
        if known is not None and (wait_s := known.rows.take(rows)):
            raise _too_often("records", self._rows_per_s, wait_s)

    def forget(self, key_id: str) -> None:
        """Look a key up again when it comes next."""
        if (known := self._known.get(key_id)) is not None:
            known.looked_up_at = float("-inf")

    async def note_use(self) -> None:
        """Write down which keys were used; what cannot be written is let go."""
        used, self._used = self._used, {}
        self._noted_at = time.monotonic()
        if used:
            try:
                await self._threads.key(self._control.note_used, used)
            except QuarkError as error:
                _log.debug("the use of keys cannot be recorded: %s", error)

    # Logins to the page: a key is traded for something that a browser keeps, and ends with the key.
    #
    # Kept is a hash of that, in the control database, where every process of every server of it
    # finds it. Nothing is remembered in between: a key that is revoked, by whatever process or
    # command, lets nobody in from that moment on.

    async def begin_session(self, key: str, secret: str) -> PageSession:
        """Log in to the page.

        Args:
            key: The key.
            secret: What the browser will keep: new, and not to be guessed.

        Raises:
            ServiceFailure: The key is not valid (whyever), may not read, or asks too often.
            SessionStoreError: Keys cannot be looked up now.
        """
        principal = await self.admit(f"Bearer {key}", "read")
        # What is known of a key that was revoked a moment ago may be too old.
        session = await self._threads.key(
            self._control.add_session,
            _digest(secret),
            principal.key_id,
            lasts_us=SESSION_S * MICROSECONDS,
        )
        if session is None:
            raise ServiceFailure(
                ErrorCode.UNAUTHORIZED, "the API key is missing, not valid or revoked"
            )
        return session

    async def find_session(self, secret: str) -> PageSession | None:
        """The login that a browser shows, with its key as it is now; None where it is over.

        Raises:
            SessionStoreError: The control database cannot be reached.
        """
        return await self._threads.key(self._control.find_session, _digest(secret))

    async def end_session(self, secret: str) -> None:
        """Log out; what is over already is no mistake."""
        await self._threads.key(self._control.end_session, _digest(secret))

    async def _look_up(self, key_id: str) -> _Known | None:
        found = await self._threads.key(self._control.find_key, key_id)
        known = self._known.get(key_id)
        if found is None:
            self._known.pop(key_id, None)
            return None
        if known is None:
            known = _Known(
                found,
                time.monotonic(),
                RateLimit(self._requests_per_s),
                RateLimit(self._rows_per_s),
            )
            self._known[key_id] = known
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        else:
            known.key, known.looked_up_at = found, time.monotonic()
        return known


def _parse(authorization: str | None) -> tuple[str, str]:
    """Id and secret; what no key has where there are none."""
    kind, _, token = (authorization or "").partition(" ")
    parts = token.strip().split("_", 2)
    if kind.lower() != "bearer" or len(parts) != 3 or parts[0] != _PREFIX or len(token) > 200:
        return _NOTHING, _NOTHING
    key_id = parts[1]
    return (key_id, parts[2]) if key_id.isascii() and key_id.isalnum() else (_NOTHING, parts[2])


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _too_often(what: str, per_s: float, wait_s: float) -> ServiceFailure:
    return ServiceFailure(
        ErrorCode.RATE_LIMITED,
        f"the key sends more than {per_s:g} {what} per second. Retry in {wait_s:.1f} s",
        retry_after_s=round(wait_s, 3),
    )
