"""Targets: where notices go. The address of a target is a secret, and stands in no text."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from quark.notifications.notices import Notice
from quark_core.config.settings import NOTIFY_SECRET, NOTIFY_SECRET_FILE
from quark_core.errors import SchemaValidationError
from quark_core.system.process import importing

# Quark's own webhook: JSON, signed, so that a receiver knows who sends it and when.
#
# Quark-Timestamp: 1767225600
# Quark-Signature: v1=HEX
# Quark-Delivery: ID
#
# HEX is the HMAC-SHA256 of the timestamp, a dot and the body as it comes, by the shared secret.
# A receiver compares it in constant time, refuses a timestamp that is more than five minutes
# off, and may refuse an ID that it has seen. `verify_webhook` does all but the last.

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
            f"notify: a signed webhook requires a secret of at least {_LEAST_SECRET} "
            f"characters, shared with the receiver. Set it in {NOTIFY_SECRET}, or in the file "
            f"that {NOTIFY_SECRET_FILE} names"
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


_log = logging.getLogger("quark")

NotifyArgument: TypeAlias = "str | Callable[[Notice], object] | Iterable[Any] | None"

Outcome = Literal["taken", "refused", "busy", "unknown"]
"""`busy`: it was surely not taken, and may be later. `unknown`: it may have been taken."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://.")
_WEBHOOKS = ("webhook+https", "webhook+http")
_MAX_TARGETS = 20
_MODULE = "quark.notifications.sending_process"


class Answer(msgspec.Struct, frozen=True):
    """What became of one attempt to send; `said` holds nothing of an address."""

    outcome: Outcome
    said: str = ""


class Target(Protocol):
    """Where notices go."""

    name: str

    def send(self, notice: Notice, timeout_s: float) -> Answer:
        """Send a notice; on a thread of the target's own."""


class _Callable:
    """A function of the user's."""

    def __init__(self, function: Callable[[Notice], object]) -> None:
        self._function = function
        self.name = "a function"

    def send(self, notice: Notice, timeout_s: float) -> Answer:  # noqa: ARG002
        """Call it; what it raises is told, and it is not called again for this notice."""
        try:
            self._function(notice)
        except BaseException as error:  # noqa: BLE001 - it may raise anything, SystemExit too
            return Answer("refused", type(error).__name__)
        return Answer("taken")


class _Address:
    """A service that is reached by a process of its own.

    That process can be ended when it takes too long, what its libraries log stays in it, and
    none of them is loaded where the training runs.
    """

    def __init__(self, url: str, scheme: str) -> None:
        self._url = url
        self.name = f"{scheme}://…"
        self._secret = find_secret() if scheme in _WEBHOOKS else b""

    def __repr__(self) -> str:
        return f"Target({self.name})"

    def send(self, notice: Notice, timeout_s: float) -> Answer:
        """Send a notice, within the time."""
        request: dict[str, Any] = {"url": self._url, "timeout_s": timeout_s}
        if self._secret:
            body, headers = sign_notice(notice, self._secret)
            request |= {"body": body.decode(), "headers": headers}
        else:
            request |= {
                "title": notice.title,
                "text": notice.text,
                "severity": notice.severity,
            }
        try:
            return _ask(request, timeout_s)
        except subprocess.TimeoutExpired:
            return Answer("unknown", f"no answer within {timeout_s:g} s")
        except (OSError, ValueError) as error:
            return Answer("refused", f"starting its process raised {type(error).__name__}")


def _ask(request: Mapping[str, Any], timeout_s: float) -> Answer:
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH", "")) if path)
    with importing():
        # A fork in the middle of this would keep our ends of the pipes open.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            # Ctrl-C in the terminal does not reach it, so that a last notice is sent.
            start_new_session=True,
        )
    with process:
        try:
            # Not on its command line, which everybody on this machine can read.
            out, _ = process.communicate(json.dumps(request).encode(), timeout_s)
        except BaseException:
            process.kill()
            raise
    try:
        return msgspec.json.decode(out, type=Answer)
    except msgspec.DecodeError:
        return Answer("unknown", f"its process ended with {process.returncode}")


def parse_targets(given: NotifyArgument, argument: str) -> tuple[Target, ...]:
    """The targets that an argument names: a URL, a function, or several of both.

    A text of the environment may hold several URLs with spaces between.

    Raises:
        SchemaValidationError: What is none; the message holds nothing of an address. The
            extra `notify` is not installed, or a webhook has no secret.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        return tuple(_parse_url(url, argument) for url in given.split())
    if callable(given):
        return (_Callable(given),)
    if not isinstance(given, Iterable):
        raise SchemaValidationError(
            f"{argument} must be a URL, a function of one notification or a list of them, not "
            f"{type(given).__name__}"
        )
    several = list(given)
    if len(several) > _MAX_TARGETS:
        raise SchemaValidationError(
            f"{argument} has {len(several)} targets; at most {_MAX_TARGETS} are allowed"
        )
    found: list[Target] = []
    for index, each in enumerate(several):
        if not isinstance(each, str) and not callable(each):
            raise SchemaValidationError(
                f"{argument}[{index}] must be a URL or a function, not {type(each).__name__}"
            )
        found += parse_targets(each, f"{argument}[{index}]")
    return tuple(found)


def _parse_url(url: str, argument: str) -> Target:
    match = _SCHEME.match(url)
    if match is None:
        raise SchemaValidationError(
            f"{argument} must be a URL such as slack://…, mailto://… or webhook+https://… (the "
            "value is not shown, because it may be a secret)"
        )
    scheme = match[1].lower()
    if scheme not in _WEBHOOKS and find_spec("apprise") is None:
        raise SchemaValidationError(
            f'{argument}: {scheme}:// requires Apprise: pip install "quark-tracker[notify]". '
            "webhook+https:// and functions do not"
        )
    return _Address(url, scheme)
