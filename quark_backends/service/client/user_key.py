"""The user's key: read from the environment when it is needed, and shown to nobody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from quark_core import settings
from quark_core.errors import SessionStoreError

__all__ = ["UserKey"]

_MAX_CHARACTERS = 1024


class UserKey:
    """The key of QUARK_USER_KEY, or of the file that QUARK_USER_KEY_FILE names.

    Raises:
        SessionStoreError: It cannot be read, or cannot be a key.
    """

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = _read()

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return bool(self._value)

    def reload(self) -> bool:
        """Read it again; whether another one is there now.

        A key that cannot be read now is left as it was.
        """
        try:
            found = _read()
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


def _read() -> str:
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
