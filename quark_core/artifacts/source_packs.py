"""The form in which the sources of a run lie among its artifacts: a manifest and packs.

The manifest names each file with its hash, and the packs, which are zip files, hold them. All are
artifacts of a hidden type with payloads by content: a pack that an earlier run has is the same
file on the disk. A store may hold what somebody else wrote: every size is bounded and every hash
checked.
"""

from __future__ import annotations

import hashlib
import io
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from quark_core.errors import ArtifactDamagedError, RunNotFoundError, SessionStoreError
from quark_core.records.names import is_sha256, split_path

MANIFEST_KEY = "sources/manifest"
"""Key of the artifact that lists the source files of a run; `unpack_sources` reads it."""

PACK_KEY = "sources/pack"
"""Key of the artifacts that hold the contents of source files."""

MOST_FILE_BYTES = 1_000_000
"""A larger file is kept by its digest only."""

_MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_MOST_ENTRIES = 50_000
_MOST_TEXT_BYTES = 64 * 1024 * 1024
_MOST_PACKED_BYTES = 128 * 1024 * 1024
# Where a zip file says how large its list of members is; without a comment it is the end.
_END = struct.Struct("<4s4H2LH")
_END_MARK = b"PK\5\6"
# Before it, where a list is so long that its size stands elsewhere.
_LONG_MARK = b"PK\6\7"
_LONG_BYTES = 20
_MOST_LIST_BYTES = 8 * 1024 * 1024
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_FORM = 1
# Zip files cannot say that there is no time; all packs of equal content shall be equal bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)
_LEVEL = 6
# How many files are packed without a pause in which others may run.
_FILES_AT_ONCE = 8
_PAUSE_S = 0.0005


class ManifestEntry(msgspec.Struct, array_like=True, frozen=True):
    """One file of a run.

    Attributes:
        path: Relative to the root, with slashes.
        sha256: Hash of the file as it was.
        size_bytes: Its size.
        pack: Hash of the pack that holds it, or nothing where none does.
        stored: Hash of what the pack holds where secrets were replaced, else nothing.
        reason: Why its text is not there, or not quite; else nothing.
    """

    path: str
    sha256: str
    size_bytes: int
    pack: str = ""
    stored: str = ""
    reason: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    form: int
    files: list[ManifestEntry]


def encode_manifest(files: Iterable[ManifestEntry]) -> bytes:
    """A manifest as a payload; equal ones are equal bytes."""
    ordered = sorted(files, key=lambda entry: entry.path)
    return zlib.compress(msgspec.json.encode(_Manifest(_FORM, ordered)), 6)


def decode_manifest(data: bytes) -> tuple[ManifestEntry, ...]:
    """The files of a manifest; those are left out whose paths lead elsewhere.

    Raises:
        ArtifactDamagedError: It is none.
    """
    try:
        manifest = msgspec.json.decode(_inflate(data), type=_Manifest)
    except (zlib.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ArtifactDamagedError(f"the source manifest cannot be read: {error}") from None
    if manifest.form != _FORM:
        raise ArtifactDamagedError(
            f"the manifest of the source snapshot has version {manifest.form}, but this version "
            f"of Quark reads {_FORM}. Upgrade quark-tracker to read it"
        )
    return tuple(
        entry
        for entry in manifest.files[:_MOST_ENTRIES]
        if split_path(entry.path) is not None and is_sha256(entry.sha256)
    )


def make_pack(texts: Mapping[str, bytes]) -> bytes:
    """A zip file of texts by their hashes; equal texts make equal bytes.

    Lets other threads run in between: this one never holds them up for longer than a few files.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as pack:
        for number, name in enumerate(sorted(texts)):
            if number % _FILES_AT_ONCE == _FILES_AT_ONCE - 1:
                time.sleep(_PAUSE_S)
            member = zipfile.ZipInfo(name, _NO_TIME)
            member.compress_type = zipfile.ZIP_DEFLATED
            pack.writestr(member, texts[name])
    return out.getvalue()


def unpack_sources(
    manifest: bytes, read_payload: Callable[[str], bytes]
) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file of a manifest whose pack can be read; for mirrors.

    Args:
        manifest: A payload under MANIFEST_KEY.
        read_payload: Gives a payload by its hash, or raises ArtifactNotFoundError.

    Raises:
        ArtifactDamagedError: It is no manifest.
    """
    packs = SourcePacks(read_payload)
    for entry in decode_manifest(manifest):
        data, _ = packs.read(entry) if entry.pack else (None, None)
        if data is not None:
            yield entry.path, data


class SourcePacks:
    """The packs of one run, each read once; and no more of them than an honest run has."""

    def __init__(self, read_payload: Callable[[str], bytes]) -> None:
        self._read_payload = read_payload
        self._open: dict[str, zipfile.ZipFile | str] = {}
        self._left_bytes = _MOST_TEXT_BYTES
        self._left_packed_bytes = _MOST_PACKED_BYTES

    def read(self, entry: ManifestEntry) -> tuple[bytes | None, str | None]:
        """A file's bytes, or why they cannot be had."""
        pack = self._open.get(entry.pack)
        if pack is None:
            pack = self._open[entry.pack] = self._find(entry.pack)
        if isinstance(pack, str):
            return None, pack
        if self._left_bytes <= 0:
            return None, f"the run's source files have more than {_MOST_TEXT_BYTES} bytes"
        try:
            member = pack.getinfo(entry.stored or entry.sha256)
            if member.compress_type not in _METHODS:
                return None, "its pack is damaged: the compression format is unknown"
            with pack.open(member) as file:
                data = file.read(MOST_FILE_BYTES * 2)
            self._left_bytes -= len(data)
        except (KeyError, zipfile.BadZipFile, zlib.error, OSError, RuntimeError) as error:
            return None, f"its pack is damaged: {error}"
        if hashlib.sha256(data).hexdigest() != (entry.stored or entry.sha256):
            return None, "the content of its pack does not match the stored hash"
        return data, None

    def _find(self, sha256: str) -> zipfile.ZipFile | str:
        try:
            if self._left_packed_bytes <= 0:
                return f"the run's source packs have more than {_MOST_PACKED_BYTES} bytes"
            data = self._read_payload(sha256)
            self._left_packed_bytes -= len(data)
            if not _has_short_list(data):
                return "its pack is damaged: its file list has an unknown format"
            return zipfile.ZipFile(io.BytesIO(data))
        except RunNotFoundError:
            raise
        except (SessionStoreError, zipfile.BadZipFile, ValueError, OSError) as error:
            return str(error) or type(error).__name__


def _has_short_list(data: bytes) -> bool:
    """Whether a zip file's list of members is as short as that of a run's sources may be."""
    if len(data) < _END.size:
        return False
    mark, *_, size_bytes, _, comment = _END.unpack(data[-_END.size :])
    is_long = data[: -_END.size][-_LONG_BYTES:].startswith(_LONG_MARK)
    return mark == _END_MARK and not comment and not is_long and size_bytes <= _MOST_LIST_BYTES


def _inflate(data: bytes) -> bytes:
    engine = zlib.decompressobj()
    out = engine.decompress(data, _MOST_MANIFEST_BYTES)
    if engine.unconsumed_tail:
        raise ValueError(f"it has more than {_MOST_MANIFEST_BYTES} bytes")
    return out
