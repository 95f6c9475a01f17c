"""Logins to the page: a key is traded for something that a browser keeps, and ends with the key.

Kept is a hash of that, in the control database, where every process of every server of it finds
it. Nothing is remembered in between: a key that is revoked, by whatever process or command, lets
nobody in from that moment on.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from quark_backends.service.protocol import ErrorCode
from quark_backends.service.server.http.replies import ServiceFailure

if TYPE_CHECKING:
    from quark_backends.service.server.service import Service
    from quark_backends.service.server.workspaces.control_database import PageSession

SESSION_S = 12 * 3600
"""How long a login lasts, unless its key ends before."""

_MICROSECONDS = 1_000_000


class PageSessions:
    """Begins, finds and ends logins; of one event loop.

    Args:
        service: What the routes share.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._control = service.control

    async def begin(self, key: str, secret: str) -> PageSession:
        """Log in.

        Args:
            key: The key.
            secret: What the browser will keep: new, and not to be guessed.

        Raises:
            ServiceFailure: The key is not valid (whyever), may not read, or asks too often.
            SessionStoreError: Keys cannot be looked up now.
        """
        principal = await self._service.guard.admit(f"Bearer {key}", "read")
        # The guard may still believe in a key that was revoked a moment ago.
        session = await self._service.threads.key(
            self._control.add_session,
            _digest(secret),
            principal.key_id,
            lasts_us=SESSION_S * _MICROSECONDS,
        )
        if session is None:
            raise ServiceFailure(
                ErrorCode.UNAUTHORIZED, "the key is missing or not valid, or was revoked"
            )
        return session

    async def find(self, secret: str) -> PageSession | None:
        """The login that a browser shows, with its key as it is now; None where it is over.

        Raises:
            SessionStoreError: The control database cannot be reached.
        """
        return await self._service.threads.key(self._control.find_session, _digest(secret))

    async def end(self, secret: str) -> None:
        """Log out; what is over already is no mistake."""
        await self._service.threads.key(self._control.end_session, _digest(secret))


def _digest(secret: str) -> str:
    # 32 random bytes need no slower hash.
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
