"""Checks of what a run is started, resumed or opened with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from quark_core.config.redaction import redact_text
from quark_core.config.storage_root import find_storage_root
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.names import check_name

_MAX_NOTES = 100_000
_MAX_TAGS = 10_000
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def describe_argument(value: object) -> str:
    """What somebody gave, as an error message shows it; whatever it is, this raises nothing."""
    try:
        return repr(value)[:60]
    except Exception:  # noqa: BLE001 - foreign code, or an integer of too many digits
        return f"a {type(value).__name__}"


def list_given(given: Iterable[Any], argument: str, most: int) -> list[Any]:
    """What an iterable of somebody's gives, and one more than `most` where it gives more.

    Raises:
        SchemaValidationError: It cannot be gone through.
    """
    try:
        return list(islice(given, most + 1))
    except Exception as error:
        raise SchemaValidationError(
            f"{argument} cannot be gone through: {type(error).__name__}: {error!s:.60}"
        ) from error


def check_run_id(run_id: object, argument: str = "run_id") -> str:
    """Return a run id, or refuse one that could not name a folder or a mirror's run.

    Raises:
        SchemaValidationError: Not a str of 1 to 128 letters, digits, `.`, `_`
            and `-`, or it begins with a dot.
    """
    if not isinstance(run_id, str) or not 0 < len(run_id) <= 128:
        raise SchemaValidationError(f"{argument} must be a str of 1 to 128 characters")
    if not may_be_run_id(run_id):
        raise SchemaValidationError(
            f"{argument} may hold letters, digits, '.', '_' and '-' and not begin with '.', "
            f"got {describe_argument(run_id)}"
        )
    return run_id


def may_be_run_id(text: str) -> bool:
    """Whether a text has the form of a run's id, or of its beginning."""
    return set(text) <= _ID_CHARACTERS and not text.startswith(".")


def check_tags(tags: Iterable[str] | None, argument: str = "tags") -> tuple[str, ...]:
    """Sorted tags without duplicates.

    Raises:
        SchemaValidationError: Not an iterable of good tags.
    """
    if tags is None:
        return ()
    if isinstance(tags, str):
        raise SchemaValidationError(f"{argument} must be an iterable of str, not one str")
    if not isinstance(tags, Iterable):
        raise SchemaValidationError(
            f"{argument} must be an iterable of str, not {type(tags).__name__}"
        )
    listed = list_given(tags, argument, _MAX_TAGS)
    if len(listed) > _MAX_TAGS:
        raise SchemaValidationError(f"{argument} has more than {_MAX_TAGS} entries")
    return tuple(sorted({check_tag(tag, f"{argument}[{i}]") for i, tag in enumerate(listed)}))


def check_tag(tag: object, argument: str) -> str:
    """Return a tag without space around it and without secrets, or refuse it.

    Raises:
        SchemaValidationError: Not a str, empty, or too long.
    """
    return check_label(tag, argument).strip()


def check_label(label: object, argument: str) -> str:
    """Return a text that people see without its secrets, or refuse one that no store could hold.

    Raises:
        SchemaValidationError: Not a str, empty, too long, or no Unicode text.
    """
    text = check_name(label, argument)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SchemaValidationError(f"{argument} holds half of a surrogate pair") from None
    return redact_text(text)


def check_notes(notes: str | None) -> str | None:
    """Notes with the secrets taken out.

    Raises:
        SchemaValidationError: Not a str, or too long.
    """
    if notes is None:
        return None
    if not isinstance(notes, str):
        raise SchemaValidationError(f"notes must be a str, not {type(notes).__name__}")
    if len(notes) > _MAX_NOTES:
        raise SchemaValidationError(f"notes has {len(notes)} characters; at most {_MAX_NOTES}")
    return redact_text(notes.encode("utf-8", "replace").decode())


def _check_encoding(root: Path) -> Path:
    """A storage root whose name can be written down, as journals and databases have to.

    Raises:
        SessionStoreError: It is not UTF-8.
    """
    try:
        str(root).encode()
    except UnicodeEncodeError:
        # As it is, no terminal could show it.
        shown = os.fsencode(root).decode("utf-8", "backslashreplace")
        raise SessionStoreError(
            f"storage_dir {shown} is not UTF-8, so it can stand neither in a journal nor in a "
            "database. Choose another storage_dir, or rename that folder."
        ) from None
    return root


def resolve_storage_dir(storage_dir: str | Path | None) -> Path:
    """The storage root as an absolute path; None means that of the working directory.

    That is the directory itself, or the next folder above it that has a store; see
    `storage_root`.

    Raises:
        SchemaValidationError: Neither a path nor None.
        SessionStoreError: It is a file, may not be looked at, or its name is no UTF-8.
    """
    if storage_dir is None:
        return _check_encoding(find_storage_root(working_directory()))
    if not isinstance(storage_dir, (str, Path)):
        raise SchemaValidationError(f"storage_dir must be a path, not {type(storage_dir).__name__}")
    try:
        root = _check_encoding(Path(storage_dir).expanduser().resolve())
        is_file = root.exists() and not root.is_dir()
    except PermissionError as error:
        raise SessionStoreError(
            f"storage_dir {storage_dir} cannot be reached: {error.strerror}. "
            "Choose another one, or ask for permission to enter the folders above it."
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        # Links that go round in a circle, an unknown ~user, a name that no disk can hold.
        raise SessionStoreError(
            f"storage_dir {storage_dir!s:.200} is no path that can be used: {error}"
        ) from error
    if is_file:
        raise SessionStoreError(f"storage_dir {root} is a file, not a directory")
    return root


def working_directory() -> Path:
    """The working directory.

    Raises:
        SessionStoreError: It was deleted.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise SessionStoreError(
            f"storage_dir was not given and there is no working directory: {error}"
        ) from error
