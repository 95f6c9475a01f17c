"""Which backends this user has chosen: what a run's folder names beyond that is not opened.

A run's folder says where its records go, and may be somebody else's. So what it
says is a wish: a backend is opened only where it stays within the folder, where this
process was asked for it (by an argument, `quark sync --allow-backend` or the
environment), or where this user has asked for it before. The latter is noted outside
of any store, one file each, in `quark/backends` of XDG_CONFIG_HOME or `~/.config`;
deleting such a file takes it back.

A place that is no URI counts from the storage root, and is noted together with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import xxhash

from quark_core.backends.registry import BackendRegistry
from quark_core.config import settings
from quark_core.config.private_files import find_private_folder, read_private, write_private
from quark_core.config.redaction import redact_text
from quark_core.errors import BackendError, BackendUnavailable
from quark_core.runs.backend_choice import BackendChoice, choose_backend

_log = logging.getLogger("quark")


class _Place(msgspec.Struct, frozen=True):
    """A backend as it is told from others.

    Attributes:
        backend: Its name.
        location: Its location, without secrets.
        options: Its options, sorted.
        storage_dir: What the location counts from, or "" where it is a URI or none.
    """

    backend: str
    location: str
    options: tuple[tuple[str, str], ...]
    storage_dir: str


# What this process was asked for: as it was written, secrets included.
_asked: dict[_Place, BackendChoice] = {}
_told: set[str] = set()


def remember(choices: Iterable[BackendChoice], storage_dir: Path) -> bool:
    """Note that this process was asked for backends, and for whom it runs.

    Backends that stay within the run's folder need no note.

    Args:
        choices: The backends, as the user has written them.
        storage_dir: The storage root of the runs.

    Returns:
        Whether a later process of this user will know; not where there is no home
        that can be written.
    """
    kept = True
    for choice in choices:
        if _stays_inside(choice):
            continue
        place = _find_place(choice, storage_dir)
        if place not in _asked:
            _asked[place] = choice
            kept = _write(place) and kept
    return kept


def find_chosen(
    specification: str, storage_dir: Path, registry: BackendRegistry
) -> tuple[BackendChoice, bool]:
    """The backend that a run's folder asks for, where this user has chosen it.

    Returns:
        The backend as this process was asked for it, secrets included, or as it is
        noted; and whether it is only noted.

    Raises:
        UnknownBackendError: Nothing installed answers to it.
        BackendContractError: A named plugin that was left out.
        BackendUnavailable: It was not chosen; the message says how to choose it.
    """
    choice = choose_backend(specification, registry)
    if _stays_inside(choice):
        return choice, False
    place = _find_place(choice, storage_dir)
    asked = _asked.get(place)
    if asked is not None:
        # The text as it was written; what answers to it may have been installed anew.
        return replace(asked, definition=choice.definition), False
    for named in _list_environment():
        try:
            other = choose_backend(named, registry)
            if _find_place(other, storage_dir) == place:
                return other, False
        except BackendError:
            continue
    if _is_noted(place):
        return choice, True
    import shlex

    shown = _show(specification)
    message = (
        f"{shown} is named by the run's folder, and neither this environment nor this user has "
        "chosen it: nothing is sent there, and the records wait; if it is to have them: "
        f"quark sync {shlex.quote(_show(str(storage_dir)))} --allow-backend {shlex.quote(shown)}"
    )
    if message not in _told:
        _told.add(message)
        _log.warning("%s", message)
    raise BackendUnavailable(message, backend=choice.definition.name)


def _stays_inside(choice: BackendChoice) -> bool:
    return choice.definition.stays_inside and not choice.location and not choice.options


def _list_environment() -> Iterator[str]:
    for name in (settings.PERSISTENCE_URL, settings.BACKENDS):
        for text in os.environ.get(name, "").split(","):
            if text.strip():
                yield text.strip()


def _find_place(choice: BackendChoice, storage_dir: Path) -> _Place:
    """What tells a choice from others, without secrets: so it stands in folders."""
    location = redact_text(choice.location)
    is_uri = "://" in location
    if is_uri:
        location = _normalize(location)
    options = sorted(
        (name, redact_text(f"?{name}={value}").removeprefix(f"?{name}="))
        for name, value in choice.options
    )
    counts_from = "" if is_uri or not (location or options) else str(storage_dir.resolve())
    return _Place(choice.definition.name, location, tuple(options), counts_from)


def _normalize(location: str) -> str:
    """A URI with what makes no difference spelled one way."""
    try:
        parts = urlsplit(location)
        netloc = parts.netloc.lower() if "@" not in parts.netloc else parts.netloc
        return parts._replace(
            scheme=parts.scheme.lower(), netloc=netloc, path=parts.path.rstrip("/")
        ).geturl()
    except ValueError:
        return location


def _find_note(place: _Place) -> tuple[Path, bytes] | None:
    directory = find_private_folder("backends")
    if directory is None:
        return None
    encoded = msgspec.json.encode(place)
    return directory / f"{xxhash.xxh3_128_hexdigest(encoded)}.json", encoded


def _write(place: _Place) -> bool:
    """Note a place for later processes; whether that is noted now."""
    found = _find_note(place)
    if found is None:
        return False
    if _is_noted(place):
        return True
    path, encoded = found
    try:
        write_private(path, encoded)
    except OSError as error:
        _log.info("that backend %s was chosen is not noted: %s", place.backend, error)
        return False
    return True


def _is_noted(place: _Place) -> bool:
    found = _find_note(place)
    if found is None:
        return False
    path, encoded = found
    return read_private(path) == encoded


def _show(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
