"""Quark's own webhook: JSON, signed, so that a receiver knows who sends it and when.

    Quark-Timestamp: 1767225600
    Quark-Signature: v1=HEX
    Quark-Delivery: ID

HEX is the HMAC-SHA256 of the timestamp, a dot and the body as it comes, by the shared secret.
A receiver compares it in constant time, refuses a timestamp that is more than five minutes
off, and may refuse an ID that it has seen. `verify_webhook` does all but the last.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from quark.notifications.notices import Notice
from quark_core.config.settings import NOTIFY_SECRET, NOTIFY_SECRET_FILE
from quark_core.errors import SchemaValidationError

REPLAY_WINDOW_S = 300
"""How far a timestamp may be off, by default."""

_VERSION = "v1"
_LEAST_SECRET = 16


def find_secret() -> bytes:
    """The secret that webhooks are signed with.

    Raises:
        SchemaValidationError: None is set, it is too short, or its file cannot be read.
    """
    secret = os.environ.get(NOTIFY_SECRET, "").strip().encode()
    path = os.environ.get(NOTIFY_SECRET_FILE, "").strip()
    if not secret and path:
        try:
            secret = Path(path).expanduser().read_bytes().strip()
        except OSError as error:
            raise SchemaValidationError(
                f"{NOTIFY_SECRET_FILE} cannot be read: {error.strerror or type(error).__name__}"
            ) from None
    if len(secret) < _LEAST_SECRET:
        raise SchemaValidationError(
            f"notify: a signed webhook needs a secret of at least {_LEAST_SECRET} characters, "
            f"which the receiver has too, in {NOTIFY_SECRET} or in the file that "
            f"{NOTIFY_SECRET_FILE} names"
        )
    return secret


def sign_notice(
    notice: Notice, secret: bytes, *, moment_s: int | None = None
) -> tuple[bytes, dict[str, str]]:
    """The body of a webhook and the headers that sign it."""
    moment = str(int(time.time()) if moment_s is None else moment_s)
    fields = msgspec.to_builtins(notice)
    delivery = hashlib.sha256(f"{notice.key}\n{notice.at}".encode()).hexdigest()[:32]
    body = msgspec.json.encode({"version": 1, "id": delivery, **fields})
    return body, {
        "Content-Type": "application/json",
        "Quark-Delivery": delivery,
        "Quark-Signature": f"{_VERSION}={_sign(secret, moment, body)}",
        "Quark-Timestamp": moment,
    }


def verify_webhook(
    headers: Mapping[str, str],
    body: bytes,
    secret: bytes,
    *,
    window_s: float = REPLAY_WINDOW_S,
) -> bool:
    """Whether a webhook comes from who has the secret, and was sent just now.

    Args:
        headers: Of the request; upper and lower case make no difference.
        body: As it came.
        secret: The shared one.
        window_s: How far its timestamp may be off.
    """
    lowered = {name.lower(): value for name, value in headers.items()}
    moment = lowered.get("quark-timestamp", "")
    signature = lowered.get("quark-signature", "")
    if not moment.isascii() or not moment.isdigit() or len(moment) > 12:
        return False
    expected = f"{_VERSION}={_sign(secret, moment, body)}"
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
        return False
    return abs(time.time() - int(moment)) <= window_s


def _sign(secret: bytes, moment: str, body: bytes) -> str:
    return hmac.new(secret, moment.encode() + b"." + body, hashlib.sha256).hexdigest()
