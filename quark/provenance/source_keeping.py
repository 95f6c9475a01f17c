"""Keeps what a run is made of: hashes of its files, and those files that the store lacks."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from quark.provenance.kept_sources import REDACTED, digest_sources
from quark.provenance.source_finding import SourceRoot, SourceSurvey, survey_sources
from quark.provenance.source_notes import (
    KnownFile,
    KnownPack,
    SourceNote,
    know_file,
    load_note,
    save_note,
)
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
from quark_core.records.json_object import JsonObject
from quark_core.records.kinds.provenance import SOURCES_KEY

if TYPE_CHECKING:
    from quark.provenance.provenance_recorder import KeepingPlace

_log = logging.getLogger("quark")

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
            raise ValueError("it is no plain file")
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
                reason = "" if len(data) <= MOST_FILE_BYTES else "larger than a source may be"
                fresh.append(self._make_entry(path, sha256, len(data), reason))
        return fresh

    def _make_entry(self, path: str, sha256: str, size: int, reason: str) -> ManifestEntry:
        if self._mode != "keep":
            reason = self._reason or "only digests are kept"
        return ManifestEntry(path, sha256, size, reason=reason)

    def _keep(self, fresh: list[ManifestEntry]) -> None:
        """Find or make the packs of files, and put what came of it into the entries."""
        state = self._state
        payloads = self._place.find_payloads()
        if payloads is None:
            self._refuse(fresh, "no backend of this run takes artifacts")
            return
        budget = _MOST_RUN_BYTES - sum(e.size_bytes for e in state.entries.values() if e.pack)
        wanted: list[ManifestEntry] = []
        for entry in fresh:
            budget -= entry.size_bytes
            if budget >= 0:
                wanted.append(entry)
            else:
                budget += entry.size_bytes
                self._refuse([entry], f"beyond the {_MOST_RUN_BYTES} bytes that a run keeps")
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
                self._refuse([entry], "it was changed before it could be kept")
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
            self._refuse(lacking, f"it could not be kept: {put.failure}")
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
            self._failure = f"it could not be kept: {failure}"
            _log.warning("the sources of the run could not be kept: %s", failure)


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
            raise ValueError("it is no plain file")
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
