"""Where a service is and who asks it: what configuration and environment say, checked."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from quark_core.backends.contract import BackendConfig
from quark_core.config import settings
from quark_core.errors import BackendUnauthorized, SessionStoreError

_PORTS = {"http": 80, "https": 443}
_OPTIONS = ("store", "timeout")
_EVERY_STORE = "*"
_EXAMPLE = "such as https://quark.example.org"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """A service, and what is asked of it.

    Attributes:
        scheme: http or https.
        host: Name or address, without brackets, in ASCII.
        port: Port, or None for the scheme's own.
        prefix: Path under which the service answers, "" or with a slash before it.
        store: Name of the project store that lists and searches keep to; None for
            all of the workspace.
        timeout_s: How long one call may take.
    """

    scheme: str
    host: str
    port: int | None
    prefix: str
    store: str | None
    timeout_s: float

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """URL of the service, without a slash at its end."""
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def store_root(self) -> str:
        """The project store as a URI, which QUARK_PERSISTENCE_URL takes."""
        return f"{self.url}?store={quote(self.store or _EVERY_STORE, safe='*')}"

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine."""
        if self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def run_path(self, run_id: str) -> str:
        """The run as a URI: the route that describes it to who has the key."""
        return f"{self.url}/v1/runs/{quote(run_id, safe='')}"

    def page_path(self, run_id: str, workspace: str) -> str:
        """The run's page, for people who log in to its workspace."""
        return f"{self.url}/run/{quote(run_id, safe='')}?in={quote(workspace, safe='')}"


def find_address(config: BackendConfig) -> ServiceAddress:
    """The service that a configuration means; QUARK_PERSISTENCE_URL where it says nothing.

    Raises:
        SessionStoreError: There is none, or its URL is no good; the message
            holds no user-info and no secret.
    """
    given = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    text = config.location.strip() or given
    source = settings.PERSISTENCE_URL if text in given else "the backend's URI"
    if not text:
        raise SessionStoreError(
            f"{settings.PERSISTENCE_URL} is not set: set it to the URL of your Quark service, "
            f"{_EXAMPLE}"
        )
    parts = _split(text.removeprefix("quark+"), source)
    options = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **config.options}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise SessionStoreError(
            f"{source}: the service has no option {unknown[0]!r:.60}; there are "
            f"{' and '.join(_OPTIONS)}"
        )
    # One store for all of a workspace, so that runs of other people and folders are found.
    store = options.get("store") or settings.chosen_store() or _EVERY_STORE
    return ServiceAddress(
        scheme=parts.scheme,
        host=_encode_host(parts.hostname or "", source),
        port=_check_port(parts, source),
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        store=None if store == _EVERY_STORE else store,
        timeout_s=_find_timeout(options, source),
    )


def check_key_is_for(address: ServiceAddress, config: BackendConfig) -> None:
    """See that the user's key may be shown to a service that a run's folder names.

    The environment has one key, which is for the service that QUARK_PERSISTENCE_URL
    names, where it names one. What this process was asked for itself is not held to it.

    Raises:
        BackendUnauthorized: The key is for another service.
    """
    given = os.environ.get(settings.PERSISTENCE_URL, "").strip()
    if not config.is_noted or not given:
        return
    parts = _split(given.removeprefix("quark+"), settings.PERSISTENCE_URL)
    host = _encode_host(parts.hostname or "", settings.PERSISTENCE_URL)
    port = _check_port(parts, settings.PERSISTENCE_URL)
    if (parts.scheme, host, port) != (address.scheme, address.host, address.port):
        raise BackendUnauthorized(
            f"the run's folder names the service at {address.url}, but {settings.USER_KEY} is for "
            f"the one of {settings.PERSISTENCE_URL}, and is sent to no other: set both to those "
            f"of {address.url} and come again",
            backend="service",
        )


def _split(text: str, source: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme == "quark":
        parts = parts._replace(scheme="https")
    if parts.scheme not in _PORTS or not host:
        shown = repr(text.rpartition("@")[2].partition("?")[0])
        raise SessionStoreError(
            f"{source} is no URL of a Quark service: {shown:.80}; give it with its scheme, "
            f"{_EXAMPLE}"
        )
    if "@" in parts.netloc:
        raise SessionStoreError(
            f"{source} must hold no user name and no password: the key belongs into "
            f"{settings.USER_KEY}"
        )
    if not parts.path.isascii() or not (parts.path or "/").isprintable() or " " in parts.path:
        raise SessionStoreError(f"{source}: the path {parts.path!r:.80} must be percent-encoded")
    return parts


def _check_port(parts: SplitResult, source: str) -> int | None:
    try:
        port = parts.port
    except ValueError:
        raise SessionStoreError(f"{source}: the port must be a number from 1 to 65535") from None
    return None if port == _PORTS[parts.scheme] else port


def _encode_host(host: str, source: str) -> str:
    if ":" in host:
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise SessionStoreError(f"{source}: {host!r:.80} is no host name") from None


def _find_timeout(options: Mapping[str, str], source: str) -> float:
    text = options.get("timeout")
    if text is None:
        return settings.persistence_timeout_s()
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 86_400.0:
        raise SessionStoreError(f"{source}: timeout must be a number of seconds, got {text!r:.40}")
    return seconds


_MAX_CHARACTERS = 1024


class UserKey:
    """The key of QUARK_USER_KEY, or of the file that QUARK_USER_KEY_FILE names.

    Raises:
        SessionStoreError: It cannot be read, or cannot be a key.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = _read_key()

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return bool(self._value)

    def reload(self) -> bool:
        """Read it again; whether another one is there now.

        A key that cannot be read now is left as it was.
        """
        try:
            found = _read_key()
        except SessionStoreError:
            return False
        changed = bool(found) and found != self._value
        if changed:
            self._value = found
        return changed

    def authorize(self) -> tuple[bytes, bytes]:
        """The header that shows it to the service."""
        return b"Authorization", b"Bearer " + self._value.encode("ascii")

    def hide_in(self, text: str) -> str:
        """A text of somebody else's without the key, should it repeat it."""
        return text.replace(self._value, "[key]") if self._value else text

    def __repr__(self) -> str:
        return f"UserKey({'set' if self._value else 'not set'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not copied into other processes: they read it themselves")


def _read_key() -> str:
    source = settings.USER_KEY
    value = os.environ.get(settings.USER_KEY, "").strip()
    path = os.environ.get(settings.USER_KEY_FILE, "").strip()
    if not value and path:
        source = settings.USER_KEY_FILE
        try:
            with Path(path).expanduser().open("rb") as file:
                value = file.read(8 * _MAX_CHARACTERS).decode("utf-8", "replace").strip()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise SessionStoreError(
                f"{source} names {path!r}, which cannot be read: {reason}"
            ) from (None)
    if value and (len(value) > _MAX_CHARACTERS or not value.isascii() or not value.isprintable()):
        raise SessionStoreError(
            f"{source} cannot be a key: it must be one line of at most {_MAX_CHARACTERS} "
            "ASCII characters"
        )
    if " " in value:
        raise SessionStoreError(f"{source} cannot be a key: there is a space in it")
    return value
