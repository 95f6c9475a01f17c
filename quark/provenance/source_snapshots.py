"""Source snapshots: the files that a program consists of, found, hashed and stored."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from quark.provenance.sources import REDACTED, digest_sources
from quark_core.artifacts.payload_folder import PayloadFolder, PutPayload
from quark_core.artifacts.source_packs import (
    MANIFEST_KEY,
    MOST_FILE_BYTES,
    PACK_KEY,
    ManifestEntry,
    encode_manifest,
    make_pack,
)
from quark_core.config.redaction import redact_code
from quark_core.records import ArtifactRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import SOURCES_KEY, FingerprintRecord
from quark_core.records.names import KEPT_SOURCES, check_text, object_path, split_name
from quark_core.system.process import find_module_file
from quark_core.version import __version__

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

CELLS_PATH = "notebook-cells.py"
"""Under which the executed cells of a notebook are kept, as one document."""
COMMAND_PATH = "command-line.py"
"""Under which the code that follows `python -c` is kept."""

_PYTHON_SUFFIXES = (".py", ".pyw")
_ENVIRONMENT_PARTS = ("site-packages", "dist-packages", "node_modules", "__pypackages__")
_OWN_PACKAGES = frozenset({"quark", "quark_backends", "quark_core", "quark_torch"})
# A checkout that is worked in is the project's folder too; what it trains is not made of it.
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN_PREFIXES = tuple(os.path.join(_OWN_FOLDER, name, "") for name in sorted(_OWN_PACKAGES))
# What lies about in sys.modules and has no file of the project's.
_MOST_OUTSIDE = 50
_MOST_FILES = 20_000
_MOST_LEVELS = 100
# Options of Python whose value may be the next argument.
_VALUED_LETTERS = "WX"
_VALUED_OPTIONS = ("--check-hash-based-pycs",)


@dataclass(frozen=True, slots=True)
class SourceRoot:
    """Where a project's sources lie.

    Attributes:
        path: The folder.
        prefixes: What the paths of its files begin with, links followed and not.
        main: The main script, or None where there is none.
        entry: How the program was begun: script, module, notebook, command, stdin, interactive,
            frozen or other.
    """

    path: str
    prefixes: tuple[str, ...]
    main: str | None
    entry: str


@dataclass(slots=True)
class SourceSurvey:
    """What was found at one look.

    Attributes:
        files: Path relative to the root, with slashes -> where the file lies.
        texts: The same -> the text of what has no file: a notebook's cells.
        left_out: The same, or what else names it -> why it is not kept.
        outside: Top-level packages that come neither from the root nor from an environment.
    """

    files: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()


def find_root(working_directory: str, script: str | None = None) -> SourceRoot:
    """Where the project lies: its git tree, or pyproject.toml, or the script's folder.

    Looks at the folders above the main script alone, which takes tens of microseconds. Where the
    script is one of an environment (a console script, a launcher), above the working directory.

    Args:
        working_directory: Folder of a program without a script.
        script: File of the main module when the run started. Defaults to its file now.
    """
    script, entry = _find_main(script)
    folder = os.path.dirname(script) if script is not None else working_directory
    top = _find_top(folder) or folder or working_directory
    prefixes = {_with_separator(top)}
    # There may be a loop of links, or the folder be gone.
    with contextlib.suppress(OSError, ValueError):
        prefixes.add(_with_separator(os.path.realpath(top)))
    return SourceRoot(top, tuple(sorted(prefixes)), script, entry)


def survey_sources(root: SourceRoot) -> SourceSurvey:
    """The modules that lie under the root and in no environment, the main script, the cells.

    Looks at what was imported and at no folder, so that it does not matter how much lies there.
    Runs none of the modules' own code: a module may be anything that somebody put there.
    """
    survey = SourceSurvey()
    if root.entry == "frozen":
        survey.left_out["<frozen>"] = "the program is frozen, so its sources are not available"
        return survey
    environment = _list_environment_prefixes(root)
    outside: set[str] = set()
    if root.main is not None:
        _add(survey, root, root.main, ())
    # A copy is made in one step. A list of the items is not: it makes objects, so that the garbage
    # collector may run code and another thread may import.
    for name, module in sys.modules.copy().items():
        if len(survey.files) >= _MOST_FILES:
            survey.left_out["<more>"] = f"more than {_MOST_FILES} modules"
            break
        path = find_module_file(module)
        if path is None or path.startswith(_OWN_PREFIXES):
            continue
        if _add(survey, root, path, environment):
            continue
        if len(outside) < _MOST_OUTSIDE and not _is_environment(path, environment):
            outside.add(name.partition(".")[0])
    survey.outside = tuple(sorted(outside - _OWN_PACKAGES - {"__main__", "__mp_main__"}))
    _add_entry(survey, root)
    return survey


def _find_main(script: str | None) -> tuple[str | None, str]:
    if getattr(sys, "frozen", False):
        return None, "frozen"
    if _find_shell() is not None:
        return None, "notebook"
    path = script or find_module_file(sys.modules.get("__main__"))
    if path is None:
        arguments = sys.orig_argv
        if _find_command(arguments) is not None:
            return None, "command"
        if getattr(sys, "ps1", None) is not None:
            return None, "interactive"
        return None, "stdin" if arguments[1:2] in ([], ["-"]) else "other"
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    entry = "script" if spec is None else "module"
    if any(f"{os.sep}{part}{os.sep}" in path for part in _ENVIRONMENT_PARTS) or _is_executable_of(
        path
    ):
        return None, entry
    return path, entry


def _find_command(arguments: Sequence[str]) -> str | None:
    """The code behind `-c`, as Python itself reads its arguments; None where there is none."""
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            return None
        if argument.startswith("--"):
            if argument in _VALUED_OPTIONS:
                next(rest, None)
            continue
        for place, letter in enumerate(argument[1:], 2):
            value = argument[place:]
            if letter == "c":
                return value or next(rest, None)
            if letter == "m":
                return None
            if letter in _VALUED_LETTERS:
                if not value:
                    next(rest, None)
                break
    return None


def _is_executable_of(path: str) -> bool:
    """Whether a script is one that an environment made, such as `torchrun`."""
    return os.path.dirname(path) == os.path.dirname(sys.executable)


def _find_shell() -> Any | None:
    """The IPython that runs this, or None; what is not imported is not asked."""
    ipython = sys.modules.get("IPython")
    try:
        return None if ipython is None else ipython.get_ipython()
    except Exception:  # noqa: BLE001 - anything may be called IPython
        return None


def _find_top(folder: str) -> str | None:
    """The folder above with a git tree, else the nearest one with a pyproject.toml."""
    project: str | None = None
    place = os.path.abspath(folder)
    home = os.path.expanduser("~")
    for _ in range(_MOST_LEVELS):
        # A home or a whole disk under git is no project: its dot files are kept so.
        if place == home or place == os.path.dirname(place):
            break
        if os.path.exists(os.path.join(place, ".git")):
            return place
        if project is None and os.path.isfile(os.path.join(place, "pyproject.toml")):
            project = place
        place = os.path.dirname(place)
    return project


def _add(survey: SourceSurvey, root: SourceRoot, path: str, environment: tuple[str, ...]) -> bool:
    """Take a file up where it is one of the project's; whether it is."""
    prefix = next((prefix for prefix in root.prefixes if path.startswith(prefix)), None)
    if prefix is None or _is_environment(path, environment):
        return False
    relative = os.path.normpath(path[len(prefix) :]).replace(os.sep, "/")
    if relative.startswith("../") or relative in survey.files:
        return relative in survey.files
    if not path.endswith(_PYTHON_SUFFIXES) and path != root.main:
        survey.left_out[relative] = "it is not Python source code"
    else:
        survey.files[relative] = path
    return True


def _add_entry(survey: SourceSurvey, root: SourceRoot) -> None:
    if root.entry == "notebook":
        cells = _read_cells()
        if cells:
            survey.texts[CELLS_PATH] = cells
    elif root.entry == "command":
        survey.texts[COMMAND_PATH] = _find_command(sys.orig_argv) or ""
    elif root.entry in ("stdin", "interactive", "other"):
        survey.left_out[f"<{root.entry}>"] = "code without a source file"


def _read_cells() -> str:
    """The cells that were executed, without what they have printed."""
    shell = _find_shell()
    cells = getattr(getattr(shell, "history_manager", None), "input_hist_parsed", None)
    if not isinstance(cells, list):
        return ""
    # The first is none, since cells are counted from 1.
    told = [
        f"# In[{number}]:\n{text.rstrip()}\n"
        for number, text in enumerate(cells)
        if number and isinstance(text, str) and text.strip()
    ]
    return "\n".join(told)


def _list_environment_prefixes(root: SourceRoot) -> tuple[str, ...]:
    """Folders within the project that are none of its own, and the standard library."""
    found = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib")}
    for place in (sys.prefix, sys.exec_prefix):
        # A project may well lie in a prefix, such as /usr/src/app in /usr.
        if any(_with_separator(place).startswith(prefix) for prefix in root.prefixes) and (
            _with_separator(place) not in root.prefixes
        ):
            found.add(place)
    return tuple(_with_separator(place) for place in sorted(found) if place)


def _is_environment(path: str, prefixes: tuple[str, ...]) -> bool:
    return path.startswith(prefixes) or any(
        f"{os.sep}{part}{os.sep}" in path for part in _ENVIRONMENT_PARTS
    )


def _with_separator(path: str) -> str:
    return path if path.endswith(os.sep) else path + os.sep


# What this machine knows of a project's sources: hashes by what `stat` says, and who has them.
#
# One note for each project and store, in `storage_dir/.quark/sources`. Nobody must keep it:
# without one the files are read, and kept anew.

_log = logging.getLogger("quark")

# A file that was written to as late as this before it was read may change without `stat`
# telling: clocks of file systems are coarse.
_RACY_NS = 2_000_000_000
_MOST_BYTES = 16 * 1024 * 1024


class KnownFile(msgspec.Struct, array_like=True, frozen=True):
    """A file as it was when it was read.

    Attributes:
        size_bytes, mtime_ns, inode: What `stat` said.
        read_ns: When it was read, by the same clock as `mtime_ns`.
        sha256: Its hash.
    """

    size_bytes: int
    mtime_ns: int
    inode: int
    read_ns: int
    sha256: str

    def fits(self, found: os.stat_result) -> bool:
        """Whether a file is surely still the one that was read."""
        return (
            self.size_bytes == found.st_size
            and self.mtime_ns == found.st_mtime_ns
            and self.inode == found.st_ino
            and self.mtime_ns + _RACY_NS < self.read_ns
        )


class KnownPack(msgspec.Struct, array_like=True, frozen=True):
    """A pack that runs have.

    Attributes:
        sha256, size_bytes: Of its payload.
        members: Hash of a file -> hash of what the pack holds of it, or nothing where that is
            the file itself.
    """

    sha256: str
    size_bytes: int
    members: dict[str, str]


class SourceNote(msgspec.Struct, frozen=True):
    """What is known of one project.

    Attributes:
        version: Of Quark; what counts as a secret may differ in another.
        files: Path -> the file.
        packs: The packs of the last run.
        texts: Hash of another payload that the last run has -> its size.
        folders: Directories of the last runs, under the storage root, the newest first.
    """

    version: str = __version__
    files: dict[str, KnownFile] = {}
    packs: list[KnownPack] = []
    texts: dict[str, int] = {}
    folders: list[str] = []


def load_note(storage_dir: Path, root: str) -> SourceNote:
    """What is known; an empty note where that cannot be read."""
    try:
        path = _find_place(storage_dir, root)
        if path.stat().st_size > _MOST_BYTES:
            return SourceNote()
        note = msgspec.json.decode(path.read_bytes(), type=SourceNote)
    except FileNotFoundError:
        return SourceNote()
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        _log.debug("the local notes about the sources under %s cannot be read: %s", root, error)
        return SourceNote()
    if note.version != __version__:
        return SourceNote(files=note.files)
    return note


def save_note(storage_dir: Path, root: str, note: SourceNote) -> None:
    """Keep what is known; a disk that fails is no error."""
    path = _find_place(storage_dir, root)
    scratch = path.with_name(f".{os.urandom(6).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_bytes(msgspec.json.encode(note))
            os.replace(scratch, path)
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("the sources under %s cannot be noted on this machine: %s", root, error)


def know_file(found: os.stat_result, sha256: str) -> KnownFile:
    """A file that was read now."""
    return KnownFile(found.st_size, found.st_mtime_ns, found.st_ino, time.time_ns(), sha256)


def _find_place(storage_dir: Path, root: str) -> Path:
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return storage_dir / ".quark" / "sources" / f"{name}.json"


SourceMode = Literal["keep", "digest", "off"]

_MOST_RUN_BYTES = 20_000_000
_MOST_HASHED_BYTES = 64 * 1024 * 1024
_MOST_TOLD = 50
_MOST_FOLDERS = 4
_MOST_PACKS = 8
# A pack is filled anew together with what is new where that is so much of it.
_SHARE_OF_NEW = 0.5
# Or where so little of it is still in use.
_SHARE_OF_USED = 0.5
# A pipe in a file's place would be waited for.
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(slots=True)
class _Seen:
    """A file as it was at first sight, and where it lay."""

    place: str
    known: KnownFile
    data: bytes | None = None


@dataclass(slots=True)
class _State:
    """What was found so far."""

    seen: dict[str, _Seen] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    entries: dict[str, ManifestEntry] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    outside: tuple[str, ...] = ()
    packs: dict[str, KnownPack] = field(default_factory=dict)
    payloads: dict[str, int] = field(default_factory=dict)
    told: object = None


class KeepingPlace:
    """A run, as the keeper of its sources needs it.

    Attributes:
        storage_dir: Its storage root.
        directory: Where its payloads are put in place, or None where they are sent.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self.storage_dir: Path = run.context.storage_dir
        self.directory: Path | None = run.payload_directory

    def find_payloads(self) -> PayloadFolder | None:
        """Where payloads are put, or None where nobody takes any."""
        return self._run.stream.payloads

    def emit_payload(self, key: str, payload_format: str, put: PutPayload) -> None:
        """Record a payload that is kept."""
        self._run.emit(
            ArtifactRecord,
            KEPT_SOURCES,
            key,
            *split_name(key),
            payload_format,
            put.size_bytes,
            put.sha256,
            payload_relative_path=object_path(put.sha256),
        )

    def emit_fingerprint(
        self, subject: str, key: str, digest: str, level: str, metadata: JsonObject
    ) -> None:
        """Record what something was."""
        self._run.emit(
            FingerprintRecord,
            subject,
            check_text(key, "key"),
            digest,
            level,
            metadata=metadata or None,
        )


class SourceKeeper:
    """Looks at the sources of this process, and keeps them; on one thread, and never in a step.

    Args:
        place: The run.
        root: Where its sources lie.
        mode: Whether texts are kept, or digests only.
        reason: Why texts are not kept, where they are not.
    """

    def __init__(
        self, place: KeepingPlace, root: SourceRoot, mode: SourceMode, reason: str = ""
    ) -> None:
        self._place, self._root, self._mode, self._reason = place, root, mode, reason
        self._state = _State()
        self._note = load_note(place.storage_dir, root.path)
        self._failure: str | None = None

    def look(self) -> None:
        """Look at what is loaded now, and record it where it is more than at the last look."""
        state = self._state
        survey = survey_sources(self._root)
        self._see(survey)
        state.left_out.update(survey.left_out)
        state.outside = survey.outside
        fresh = self._list_fresh()
        told = (frozenset(state.changed), frozenset(state.left_out), state.outside)
        if not fresh and told == state.told:
            return
        state.told = told
        keeping = [entry for entry in fresh if self._mode == "keep" and not entry.reason]
        self._keep(keeping)
        for entry in fresh:
            kept = state.entries.get(entry.path)
            if kept is None or kept.sha256 != entry.sha256:
                state.entries[entry.path] = entry
        for seen in state.seen.values():
            seen.data = None
        self._record()
        self._save()

    def keep_payload(self, key: str, data: bytes) -> str | None:
        """Keep what many runs have alike; returns its hash, or None where nobody takes it."""
        digest = self._keep_payload(key, data)
        self._save()
        return digest

    def _keep_payload(self, key: str, data: bytes) -> str | None:
        payloads = self._place.find_payloads()
        if payloads is None:
            return None
        put = self._put_shared(payloads, data)
        if put.failure is not None:
            self._tell(put.failure)
            return None
        self._place.emit_payload(key, "text" if key != MANIFEST_KEY else "bytes", put)
        return put.sha256

    def _see(self, survey: SourceSurvey) -> None:
        state = self._state
        for path, place in survey.files.items():
            try:
                found = os.stat(place)
                seen = state.seen.get(path)
                if seen is None:
                    state.seen[path] = self._read(place, found)
                    state.left_out.pop(path, None)
                elif _has_changed(seen.known, found):
                    now = self._read(place, found)
                    if now.known.sha256 != seen.known.sha256:
                        state.changed.add(path)
                    # What is kept is what was there first, and the hash is of that.
                    seen.known = KnownFile(*_list_figures(now.known), seen.known.sha256)
            except (OSError, ValueError) as error:
                if path not in state.seen:
                    reason = getattr(error, "strerror", None) or str(error)
                    state.left_out[path] = f"it cannot be read: {reason}"
        state.texts.update(survey.texts)

    def _read(self, place: str, found: os.stat_result) -> _Seen:
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > _MOST_HASHED_BYTES:
            raise ValueError(f"it is larger than {_MOST_HASHED_BYTES} bytes")
        known = self._note.files.get(place)
        if known is not None and known.fits(found):
            return _Seen(place, known)
        data, found = _read_file(place)
        known = know_file(found, hashlib.sha256(data).hexdigest())
        return _Seen(place, known, data if len(data) <= MOST_FILE_BYTES else None)

    def _list_fresh(self) -> list[ManifestEntry]:
        """The files that no manifest has yet, or has with another content."""
        fresh = []
        for path, seen in self._state.seen.items():
            if path not in self._state.entries:
                size = seen.known.size_bytes
                reason = "" if size <= MOST_FILE_BYTES else f"larger than {MOST_FILE_BYTES} bytes"
                fresh.append(self._make_entry(path, seen.known.sha256, size, reason))
        for path, text in self._state.texts.items():
            data = text.encode("utf-8", "replace")
            sha256 = hashlib.sha256(data).hexdigest()
            known = self._state.entries.get(path)
            if known is None or known.sha256 != sha256:
                reason = "" if len(data) <= MOST_FILE_BYTES else "larger than a source file may be"
                fresh.append(self._make_entry(path, sha256, len(data), reason))
        return fresh

    def _make_entry(self, path: str, sha256: str, size: int, reason: str) -> ManifestEntry:
        if self._mode != "keep":
            reason = self._reason or "only digests are stored"
        return ManifestEntry(path, sha256, size, reason=reason)

    def _keep(self, fresh: list[ManifestEntry]) -> None:
        """Find or make the packs of files, and put what came of it into the entries."""
        state = self._state
        payloads = self._place.find_payloads()
        if payloads is None:
            self._refuse(fresh, "no backend of this run accepts artifacts")
            return
        budget = _MOST_RUN_BYTES - sum(e.size_bytes for e in state.entries.values() if e.pack)
        wanted: list[ManifestEntry] = []
        for entry in fresh:
            budget -= entry.size_bytes
            if budget >= 0:
                wanted.append(entry)
            else:
                budget += entry.size_bytes
                self._refuse([entry], f"beyond the {_MOST_RUN_BYTES} bytes that a run stores")
        lacking = self._adopt_packs(payloads, wanted)
        if lacking:
            self._write_pack(payloads, lacking)

    def _adopt_packs(
        self, payloads: PayloadFolder, wanted: list[ManifestEntry]
    ) -> list[ManifestEntry]:
        """Take up what packs have that are there already; returns the files that none has."""
        state = self._state
        owners = {sha: pack for pack in state.packs.values() for sha in pack.members}
        known = self._note.packs if payloads.root == self._place.directory else []
        others = {sha: pack for pack in known for sha in pack.members}
        lacking = [e for e in wanted if e.sha256 not in owners and e.sha256 not in others]
        refilled = _choose_refilled(known, wanted, lacking) if not state.packs else frozenset()
        for entry in wanted:
            pack = owners.get(entry.sha256)
            if pack is None:
                pack = others.get(entry.sha256)
                if pack is None:
                    continue
                if pack.sha256 in refilled or not self._adopt(payloads, pack):
                    lacking.append(entry)
                    continue
            self._enter(entry, pack)
        return lacking

    def _adopt(self, payloads: PayloadFolder, pack: KnownPack) -> bool:
        if pack.sha256 in self._state.packs:
            return True
        if not self._find_elsewhere(payloads, pack.sha256, pack.size_bytes):
            return False
        self._state.packs[pack.sha256] = pack
        self._place.emit_payload(PACK_KEY, "bytes", PutPayload(pack.sha256, pack.size_bytes))
        return True

    def _find_elsewhere(self, payloads: PayloadFolder, sha256: str, size_bytes: int) -> bool:
        return any(
            payloads.adopt(self._place.storage_dir / folder, sha256, size_bytes)
            for folder in self._note.folders
        )

    def _write_pack(self, payloads: PayloadFolder, lacking: list[ManifestEntry]) -> None:
        state = self._state
        texts: dict[str, bytes] = {}
        stored: dict[str, str] = {}
        for entry in lacking:
            data = self._load(entry)
            if data is None:
                self._refuse([entry], "it was changed before it could be stored")
                continue
            shown = _hide_secrets(data)
            sha256 = entry.sha256 if shown is data else hashlib.sha256(shown).hexdigest()
            stored[entry.sha256] = "" if shown is data else sha256
            texts[sha256] = shown
        if not texts:
            return
        put = payloads.put_bytes(make_pack(texts))
        if put.failure is not None:
            self._tell(put.failure)
            self._refuse(lacking, f"it could not be stored: {put.failure}")
            return
        pack = KnownPack(put.sha256, put.size_bytes, stored)
        state.packs[pack.sha256] = pack
        self._place.emit_payload(PACK_KEY, "bytes", put)
        for entry in lacking:
            if entry.sha256 in stored:
                self._enter(entry, pack)

    def _load(self, entry: ManifestEntry) -> bytes | None:
        """The content of a file as it was at first sight, where it still can be had."""
        text = self._state.texts.get(entry.path)
        if text is not None:
            return text.encode("utf-8", "replace")
        seen = self._state.seen[entry.path]
        if seen.data is not None:
            return seen.data
        try:
            data, _ = _read_file(seen.place)
        except (OSError, ValueError):
            return None
        return data if hashlib.sha256(data).hexdigest() == entry.sha256 else None

    def _enter(self, entry: ManifestEntry, pack: KnownPack) -> None:
        stored = pack.members[entry.sha256]
        reason = REDACTED if stored else ""
        self._state.entries[entry.path] = ManifestEntry(
            entry.path, entry.sha256, entry.size_bytes, pack.sha256, stored, reason
        )

    def _refuse(self, entries: Iterable[ManifestEntry], reason: str) -> None:
        for entry in entries:
            self._state.entries[entry.path] = ManifestEntry(
                entry.path, entry.sha256, entry.size_bytes, reason=reason
            )

    def _record(self) -> None:
        state = self._state
        entries = state.entries.values()
        manifest = self._keep_payload(MANIFEST_KEY, encode_manifest(entries))
        root = self._root
        main = next((path for path, seen in state.seen.items() if seen.place == root.main), None)
        self._place.emit_fingerprint(
            "code",
            SOURCES_KEY,
            digest_sources((entry.path, entry.sha256) for entry in entries),
            "bytes",
            JsonObject(
                {
                    "root": root.path,
                    "main": main,
                    "entry": root.entry,
                    "files": len(state.entries),
                    "kept": sum(1 for entry in entries if entry.pack),
                    "size_bytes": sum(entry.size_bytes for entry in entries),
                    "manifest": manifest,
                    "outside": list(state.outside),
                    "changed": sorted(state.changed)[:_MOST_TOLD],
                    "left_out": dict(sorted(state.left_out.items())[:_MOST_TOLD]),
                    "left_out_count": len(state.left_out),
                    "reason": self._reason or self._failure,
                }
            ),
        )

    def _put_shared(self, payloads: PayloadFolder, data: bytes) -> PutPayload:
        """Keep a payload, as another name of an earlier run's where one has it."""
        sha256 = hashlib.sha256(data).hexdigest()
        put = PutPayload(sha256, len(data))
        in_place = payloads.root == self._place.directory
        is_known = in_place and self._note.texts.get(sha256) == len(data)
        if not is_known or not self._find_elsewhere(payloads, sha256, len(data)):
            put = payloads.put_bytes(data)
        if put.failure is None:
            self._state.payloads[sha256] = len(data)
        return put

    def _save(self) -> None:
        """Note what is known now, for the next run."""
        state, place = self._state, self._place
        files = {seen.place: seen.known for seen in state.seen.values()}
        folders = list(self._note.folders)
        packs, texts = list(state.packs.values()), dict(state.payloads)
        if place.directory is None:
            packs, texts = self._note.packs, self._note.texts
        else:
            own = os.path.relpath(place.directory, place.storage_dir)
            folders = [own, *(folder for folder in folders if folder != own)][:_MOST_FOLDERS]
        note = SourceNote(files=files, packs=packs, texts=texts, folders=folders)
        if note != self._note:
            save_note(place.storage_dir, self._root.path, note)

    def _tell(self, failure: str) -> None:
        if self._failure is None:
            self._failure = f"it could not be stored: {failure}"
            _log.warning("the sources of the run could not be stored: %s", failure)


def _choose_refilled(
    packs: Sequence[KnownPack], wanted: Iterable[ManifestEntry], lacking: Iterable[ManifestEntry]
) -> frozenset[str]:
    """Hashes of the packs whose files go into a new one, together with what is new.

    So a run has a few packs, whose sizes differ as powers do, and an edit of one file writes a
    small one: of many edits each byte is written again a few times at most.

    Args:
        packs: Those that the last run has.
        wanted: The files of this run.
        lacking: Those of them that no pack has.
    """
    sizes = {entry.sha256: entry.size_bytes for entry in wanted}
    new = sum(entry.size_bytes for entry in lacking)
    if not new:
        return frozenset()
    used = {pack.sha256: sum(sizes.get(member, 0) for member in pack.members) for pack in packs}
    counts = {pack.sha256: sum(1 for member in pack.members if member in sizes) for pack in packs}
    refilled: set[str] = set()
    ordered = sorted((pack for pack in packs if counts[pack.sha256]), key=lambda p: used[p.sha256])
    left = len(ordered) + 1
    for pack in ordered:
        is_sparse = counts[pack.sha256] < _SHARE_OF_USED * len(pack.members)
        if new >= _SHARE_OF_NEW * used[pack.sha256] or is_sparse or left > _MOST_PACKS:
            refilled.add(pack.sha256)
            new += used[pack.sha256]
            left -= 1
    return frozenset(refilled)


def _read_file(place: str) -> tuple[bytes, os.stat_result]:
    """A file's content, and what `stat` says of it, which is older than the content.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no plain file, or too large.
    """
    descriptor = os.open(place, _OPEN)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(_MOST_HASHED_BYTES + 1)
        if len(data) > _MOST_HASHED_BYTES:
            raise ValueError(f"it is larger than {_MOST_HASHED_BYTES} bytes")
    return data, found


def _has_changed(known: KnownFile, found: os.stat_result) -> bool:
    return _list_figures(known)[:3] != (found.st_size, found.st_mtime_ns, found.st_ino)


def _list_figures(known: KnownFile) -> tuple[int, int, int, int]:
    return known.size_bytes, known.mtime_ns, known.inode, known.read_ns


def _hide_secrets(data: bytes) -> bytes:
    """The same bytes where no secret is in them, else the text without."""
    # Every byte is a character of Latin-1, and every shape of a secret is ASCII.
    text = data.decode("latin-1")
    shown = redact_code(text)
    return data if shown == text else shown.encode("latin-1")
