"""Checks of what a run is started, resumed, opened, grouped or annotated with."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from quark_core.config.redaction import redact_text, redact_values
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records.json_object import JsonObject, encode_json, normalize_json
from quark_core.records.names import check_name

# Finds the storage root of a working directory: its own, or the next one above it, like git.
#
# What lies above may be somebody else's, and is then no choice of this user's: the way up
# ends at the home directory and at the root of the file system (neither is a project, so
# that a store which lies there by chance takes no runs), at a border of a file system, and at
# a folder that belongs to another user or that everybody may write. A store that another
# user owns is told and left alone; `storage_dir` takes it all the same.

_STORE, _MARKER = ".quark", "store.json"

_log = logging.getLogger("quark")
_told: set[Path] = set()


def find_storage_root(directory: Path) -> Path:
    """The folder whose store a working directory uses, where nobody says which.

    It is the directory itself where it has a store, or anything called `.quark`; else the
    next folder above it that has a store of this user's; else the directory itself.
    Opens no store, and costs a few looks at folders.
    """
    if _exists(directory / _STORE):
        return directory
    user = os.geteuid() if hasattr(os, "geteuid") else None
    home = _find_home()
    try:
        here = directory.stat()
    except OSError:
        return directory
    folder, device = directory, here.st_dev
    if folder in (home, Path(folder.anchor)) or not _is_own(here, user):
        return directory
    while True:
        folder = folder.parent
        if folder in (home, Path(folder.anchor)):
            return directory
        try:
            status = folder.stat()
        except OSError:
            return directory
        if status.st_dev != device:
            return directory
        found = _look_at_store(folder)
        if not all(_is_own(each, user) for each in found):
            _tell_of_stranger(folder)
            return directory
        if not _is_own(status, user):
            return directory
        if found:
            return folder


def _look_at_store(folder: Path) -> tuple[os.stat_result, ...]:
    """The states of a store's folder, of what that leads to, and of its mark; none of no store."""
    store = folder / _STORE
    try:
        marker = os.lstat(store / _MARKER)
        found = os.lstat(store), os.stat(store), marker
    except OSError:
        return ()
    return found if stat.S_ISREG(marker.st_mode) else ()


def _is_own(status: os.stat_result, user: int | None) -> bool:
    if user is None:
        return True
    # The mode of a link is nobody's; what it leads to counts.
    open_to_all = status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode)
    return status.st_uid == user and not open_to_all


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def _find_home() -> Path | None:
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):
        return None


def _tell_of_stranger(folder: Path) -> None:
    if folder in _told:
        return
    _told.add(folder)
    _log.warning(
        "The Quark store in %s is not used, because the folder belongs to another user or "
        "anyone can write to it. If you trust it, pass storage_dir=%r, or --storage-dir on the "
        "command line",
        folder,
        str(folder),
    )


_MAX_NOTES = 100_000
_MAX_TAGS = 10_000
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def describe_argument(value: object) -> str:
    """What somebody gave, as an error message shows it; whatever it is, this raises nothing."""
    try:
        return repr(value)[:60]
    except Exception:  # noqa: BLE001 - foreign code, or an integer of too many digits
        return type(value).__name__


def list_given(given: Iterable[Any], argument: str, most: int) -> list[Any]:
    """What an iterable of somebody's gives, and one more than `most` where it gives more.

    Raises:
        SchemaValidationError: It cannot be gone through.
    """
    try:
        return list(islice(given, most + 1))
    except Exception as error:
        raise SchemaValidationError(
            f"{argument} cannot be iterated: {type(error).__name__}: {error!s:.60}"
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
            f"{argument} may contain letters, digits, '.', '_' and '-', and must not start with "
            f"'.', got {describe_argument(run_id)}"
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
        raise SchemaValidationError(f"{argument} must be an iterable of str, not a single str")
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
        raise SchemaValidationError(f"{argument} contains half of a surrogate pair") from None
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
            f"storage_dir {shown} is not valid UTF-8, so journals and databases cannot store "
            "it. Choose another storage_dir, or rename that folder."
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
            f"storage_dir {storage_dir} cannot be accessed: {error.strerror}. Choose another "
            "one, or ask for permission to enter its parent folders."
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        # Links that go round in a circle, an unknown ~user, a name that no disk can hold.
        raise SessionStoreError(
            f"storage_dir {storage_dir!s:.200} is not a usable path: {error}"
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
            f"storage_dir is required, because the working directory is missing: {error}"
        ) from error


REVISION_FIELD = "revision"
"""Which one of the runs of one configuration a run is, from 1 on, where it was asked for."""

UID_FIELD = "uid"
"""What a run was started as (configuration, seeds and version in one), where it was asked for."""

VERSION_FIELD = "version"
"""What a run's code is called, where `start_run(version=)` says it."""

MAX_FIELD_BYTES = 16_384
"""How much JSON the value of one field may be."""

EXCHANGED_FIELD = "why_exchanged"
"""What `quark why --check` has put from one run into another, in the run that it has made so."""

IfExists = Literal["skip", "resume", "again"]
"""What a start does where its configuration has been run before."""

_MAX_FIELDS = 1_000
_MAX_GROUPS = 100
_MAX_LEVELS = 16


def check_group_path(path: object, argument: str = "group") -> str:
    """Return the path of a group, such as `paper/fig3`, without secrets, or refuse it.

    Raises:
        SchemaValidationError: Not a str, empty, too long or too deep, with an empty part or
            space around one, or with a character that cannot be seen.
    """
    text = check_label(path, argument)
    if not text.isprintable():
        raise SchemaValidationError(f"{argument} contains an invisible character: {text[:60]!r}")
    parts = text.split("/")
    if len(parts) > _MAX_LEVELS:
        raise SchemaValidationError(
            f"{argument} has {len(parts)} levels; at most {_MAX_LEVELS} are allowed"
        )
    if "" in parts:
        raise SchemaValidationError(
            f"{argument} must be a path such as 'paper/fig3', without a leading or trailing "
            f"slash and without empty parts, got {text[:60]!r}"
        )
    if any(part != part.strip() for part in parts):
        raise SchemaValidationError(f"{argument} has spaces around a part: {text[:60]!r}")
    return text


def check_groups(groups: str | Iterable[str] | None, argument: str = "group") -> tuple[str, ...]:
    """Sorted paths of groups without duplicates, of one text or of several.

    Raises:
        SchemaValidationError: Neither, too many, or one of them is no path.
    """
    if groups is None:
        return ()
    if isinstance(groups, str):
        return (check_group_path(groups, argument),)
    if not isinstance(groups, Iterable) or isinstance(groups, (bytes, Mapping)):
        raise SchemaValidationError(
            f"{argument} must be a str or an iterable of str, not {type(groups).__name__}"
        )
    listed = list_given(groups, argument, _MAX_GROUPS)
    if len(listed) > _MAX_GROUPS:
        raise SchemaValidationError(f"{argument} has more than {_MAX_GROUPS} paths, the maximum")
    paths = {check_group_path(path, f"{argument}[{i}]") for i, path in enumerate(listed)}
    return tuple(sorted(paths))


def is_below(path: str, group: str) -> bool:
    """Whether a path is a group or lies in it."""
    return path == group or path.startswith(f"{group}/")


def check_fields(fields: object, argument: str = "fields") -> JsonObject:
    """Fields as they are kept: plain JSON values under checked names, secrets redacted.

    Raises:
        SchemaValidationError: No mapping, too many, or one whose name or value cannot be kept;
            the message names it.
    """
    if not isinstance(fields, Mapping):
        raise SchemaValidationError(
            f"{argument} must be a mapping of names to values, not {type(fields).__name__}"
        )
    try:
        listed = list(fields.items())
    except Exception as error:
        raise SchemaValidationError(
            f"{argument} cannot be iterated: {type(error).__name__}: {error!s:.60}"
        ) from error
    if len(listed) > _MAX_FIELDS:
        raise SchemaValidationError(
            f"{argument} has {len(listed)} entries; at most {_MAX_FIELDS} are allowed"
        )
    checked: dict[str, Any] = {}
    for name, value in listed:
        known = _check_field_name(name, f"{argument}: the name {describe_argument(name)}")
        normal = normalize_json(value, f"{argument}[{known[:60]!r}]")
        size = len(encode_json(normal))
        if size > MAX_FIELD_BYTES:
            raise SchemaValidationError(
                f"{argument}[{known[:60]!r}] has {size} bytes of JSON; at most "
                f"{MAX_FIELD_BYTES} are allowed. Log larger values as an artifact"
            )
        checked[known] = normal
    return JsonObject(redact_values(checked))


def check_field_names(names: Iterable[str] | None, argument: str = "fields") -> tuple[str, ...]:
    """Sorted names of fields without duplicates.

    Raises:
        SchemaValidationError: Not an iterable of good names.
    """
    return tuple(_check_field_name(name, argument) for name in check_tags(names, argument))


def _check_field_name(name: object, argument: str) -> str:
    text = check_label(name, argument)
    if not text.isprintable() or text != text.strip():
        raise SchemaValidationError(f"{argument} must be printable and have no surrounding spaces")
    return text


def check_if_exists(if_exists: object) -> IfExists | None:
    """Return what was asked for, or refuse it.

    Raises:
        SchemaValidationError: Not one of its words.
    """
    if if_exists is None:
        return None
    if not isinstance(if_exists, str) or if_exists not in get_args(IfExists):
        raise SchemaValidationError(
            f"if_exists must be one of {', '.join(map(repr, get_args(IfExists)))}, or None, got "
            f"{describe_argument(if_exists)}"
        )
    return if_exists  # type: ignore[return-value]
