"""ArtifactStore: stores images, tables, files, directories and references."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Unpack

from quark_core.artifacts.payload_folder import CHUNK_BYTES, read_path
from quark_core.artifacts.payload_formats import EXTENSIONS, choose_format, encode_payload
from quark_core.config.redaction import redact_object
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import ArtifactRecord
from quark_core.records.json_object import normalize_object
from quark_core.records.names import (
    MAX_NAME_LENGTH,
    check_artifact_type,
    encode_name,
    is_sha256,
    split_path,
)
from quark_core.records.query import spell_out
from quark_core.writers.artifact_evaluations import EvaluationArtifacts
from quark_core.writers.artifact_links import LinkedArtifacts, check_aliases
from quark_core.writers.artifact_media import MediaArtifacts, RecordingArtifacts
from quark_core.writers.artifact_reading import NOT_KEPT
from quark_core.writers.artifact_writing import (
    Intake,
    PendingArtifact,
    Placement,
    map_in_threads,
    open_file,
)

MOST_FILES = 100_000
"""So many files a directory may have."""

_MOST_DEPTH = 64
_MOST_LINKS = 2_000
_MOST_TOLD = 100
_MOST_URI = 2_000
_HASHED_BYTES = 64 * 1024 * 1024
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{1,30}://", re.IGNORECASE)


@dataclass(slots=True)
class DirectoryScan:
    """What a directory holds.

    Attributes:
        root: The directory.
        files: Each regular file: its path below the root, with slashes, and where it lies.
        skipped: Path -> why it is left out; the first hundred.
        skipped_count: How many are.
        links: How many links to directories were followed.
    """

    root: Path
    files: list[tuple[str, Path]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    skipped_count: int = 0
    links: int = 0

    def follow(self) -> None:
        """Count a link to a directory: some that lead to each other make ways without an end.

        Raises:
            SchemaValidationError: There are too many.
        """
        self.links += 1
        if self.links > _MOST_LINKS:
            raise SchemaValidationError(
                f"path {self.root} has more than {_MOST_LINKS} links to directories. Log the "
                "linked directories instead"
            )

    def skip(self, relative: str, reason: str) -> None:
        """Note what is left out."""
        self.skipped_count += 1
        if len(self.skipped) < _MOST_TOLD:
            self.skipped[relative[:_MOST_URI].encode("utf-8", "replace").decode()] = reason


def scan_directory(path: object, exclude: tuple[str, ...]) -> DirectoryScan:
    """The files below a directory, in the order of their names.

    Links are followed, but not around: one that leads to a directory above itself is left out.

    Args:
        path: The directory.
        exclude: Patterns such as `*.tmp` or `.git/*`, of paths below it, or of names.

    Raises:
        SchemaValidationError: No directory that can be read, or one with too many files.
    """
    root = read_path(path)
    scan = DirectoryScan(root)
    try:
        if not root.is_dir():
            raise SchemaValidationError(f"path {root} is not a directory. Use log_file for a file")
        os.scandir(root).close()
        above = (_identify(root),)
    except (OSError, ValueError) as error:
        if isinstance(error, SchemaValidationError):
            raise
        raise SchemaValidationError(f"path {root} cannot be read: {error}") from error
    for relative, place in _walk(scan, root, "", above):
        if any(fnmatch(relative, each) or fnmatch(place.name, each) for each in exclude):
            continue
        if len(scan.files) >= MOST_FILES:
            raise SchemaValidationError(
                f"path {root} has more than {MOST_FILES} files. Pack them into archives first, "
                "for example with shutil.make_archive"
            )
        scan.files.append((relative, place))
    return scan


def _walk(
    scan: DirectoryScan, folder: Path, prefix: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, Path]]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        scan.skip(prefix.rstrip("/"), error.strerror or str(error))
        return
    for entry in found:
        relative = f"{prefix}{entry.name}"
        if split_path(relative) is None:
            scan.skip(relative, "its name is not a valid path on every system")
            continue
        place = Path(entry.path)
        try:
            mode = entry.stat().st_mode
            if stat.S_ISREG(mode):
                yield relative, place
            elif not stat.S_ISDIR(mode):
                scan.skip(relative, "it is not a regular file")
            elif (identity := _identify(place)) in above:
                scan.skip(relative, "it is a link to a directory that contains it")
            elif len(above) >= _MOST_DEPTH:
                scan.skip(relative, f"it is nested more than {_MOST_DEPTH} directories deep")
            else:
                if entry.is_symlink():
                    scan.follow()
                yield from _walk(scan, place, f"{relative}/", (*above, identity))
        except OSError as error:
            scan.skip(relative, error.strerror or str(error))


def _identify(place: Path) -> tuple[int, int]:
    found = place.stat()
    return found.st_dev, found.st_ino


def describe_reference(
    uri: object, size_bytes: int | None, sha256: str | None, etag: str | None
) -> dict[str, Any]:
    """What is known of a file that lies elsewhere, as JSON.

    Of a file of this machine its size and time are looked up, and, up to 64 MB, its hash.

    Args:
        uri: Such as `s3://bucket/key`, or a path.
        size_bytes, sha256, etag: What is known besides.

    Raises:
        SchemaValidationError: No address, or a hash that is none.
    """
    given: Any = uri
    try:
        text = os.fsdecode(os.fspath(given))
    except TypeError:
        raise SchemaValidationError(
            f"uri must be an address or a path, not {type(uri).__name__}"
        ) from None
    if not text or len(text) > _MOST_URI or not text.isprintable():
        raise SchemaValidationError(
            f"uri must be an address or a path of at most {_MOST_URI} characters, got {text!r:.80}"
        )
    if sha256 is not None and not is_sha256(str(sha256)):
        raise SchemaValidationError(
            f"sha256 must be 64 lowercase hexadecimal digits, got {sha256!r:.80}"
        )
    if size_bytes is not None and (
        isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 0
    ):
        raise SchemaValidationError(
            f"size_bytes must be a non-negative int, got {size_bytes!r:.60}"
        )
    found: dict[str, Any] = {"uri": text, "size_bytes": size_bytes, "sha256": sha256, "etag": etag}
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[0].lower() == "file://":
        found.update(_look(Path(text.removeprefix("file://")).expanduser(), size_bytes, sha256))
    return {name: value for name, value in found.items() if value is not None}


def _look(place: Path, size_bytes: int | None, sha256: str | None) -> dict[str, Any]:
    """What this machine says of a file of its own; nothing of one that is not there."""
    try:
        absolute = place.absolute()
        found = absolute.stat()
        told: dict[str, Any] = {"uri": absolute.as_uri(), "modified_at_s": found.st_mtime}
        if stat.S_ISREG(found.st_mode):
            told["size_bytes"] = found.st_size if size_bytes is None else size_bytes
            if sha256 is None and found.st_size <= _HASHED_BYTES:
                told["sha256"] = _hash(absolute)
        return told
    except (OSError, ValueError) as error:
        return {"missing": getattr(error, "strerror", None) or str(error)}


def _hash(place: Path) -> str:
    digest = hashlib.sha256()
    with place.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


DIRECTORY = "directory"
"""Type of the manifest of a directory."""

DIRECTORY_FILE = "directory_file"
"""Type of each of its files, which is found by the manifest alone."""

REFERENCE = "reference"
"""Type of what says where a file lies that is not stored."""

_THREADS = 8
_SETTLED_NS = 100_000_000
_MOST_MARKS = 500_000


class CollectionArtifacts(LinkedArtifacts):
    """The ways of storing many files as one artifact, or none; see `ArtifactStore`."""

    @spell_out(Placement)
    def log_directory(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        exclude: Sequence[str] = (),
        aliases: Sequence[str] | None = (),
        **place: Unpack[Placement],
    ) -> PendingArtifact:
        """Store a directory as one artifact: a manifest, and each new file.

        The call lists the files; a background thread stores them. The manifest is stored last, so
        an incomplete directory is not an artifact. A file that this run has already stored is only
        read, and skipped if it has not been modified.

        Unreadable, special and circular entries are skipped with a warning and listed in the
        manifest. Files that change during the copy are marked there.

        Args:
            path: Path of the directory, with up to 100,000 files.
            name: Name, or full key. Defaults to the name of the directory.
            exclude: Patterns to skip, such as `*.tmp` or `.git/*`.
            aliases: Names for this version, such as "best".
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            A PendingArtifact. Its `wait()` returns the record: type `directory`, JSON `{"files":
            [{"path", "size_bytes", "sha256"}], "skipped": {path: reason}}`.

        Raises:
            SchemaValidationError: The directory does not exist, or an argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
        """
        named = check_aliases(aliases)
        patterns = check_patterns(exclude)
        key = read_path(path).absolute().name if name is None else name
        intake = self._check("log_directory", DIRECTORY, key, **place)
        scan = scan_directory(path, patterns)
        if scan.skipped_count:
            first = next(iter(scan.skipped.items()), ("", ""))
            warnings.warn(
                f"log_directory {scan.root}: {scan.skipped_count} files are omitted, such as "
                f"{first[0]!r:.200} ({first[1]})",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._background.submit(
            intake.key, lambda: self._name(self._keep_directory(intake, scan), named)
        )

    @spell_out(Placement)
    def log_reference(
        self,
        name: str,
        uri: str | Path,
        *,
        size_bytes: int | None = None,
        sha256: str | None = None,
        etag: str | None = None,
        aliases: Sequence[str] | None = (),
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Record the location of a file without copying it.

        Nothing is read over a network. For a path, size, time and (up to 64 MB) hash are recorded.
        Secrets in a URL are removed. Returns at once.

        Args:
            name: Name, or full key.
            uri: URL (`s3://...`, `https://...`), or path of a file or directory.
            size_bytes, sha256, etag: Further known properties.
            aliases: Names for this version, such as "best".
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: type `reference`, JSON `{"uri", "size_bytes", "sha256", ...}`, which is also
            in its metadata.

        Raises:
            SchemaValidationError: The location or another argument is invalid.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        named = check_aliases(aliases)
        intake = self._check("log_reference", REFERENCE, name, **place)
        found = describe_reference(uri, size_bytes, sha256, etag)
        told: Mapping[str, Any] = redact_object(normalize_object(found, "uri")) or {}
        return self._name(self._keep_json(intake, told, {"reference": told}), named)

    def _keep_directory(self, intake: Intake, scan: DirectoryScan) -> ArtifactRecord:
        file_intake = intake._replace(artifact_type=DIRECTORY_FILE, metadata=None)

        def keep(item: tuple[str, Path]) -> dict[str, Any] | None:
            relative, place = item
            try:
                return self._keep_directory_file(file_intake, relative, place)
            except SchemaValidationError as error:
                scan.skip(relative, str(error))
                return None

        skipped_before = scan.skipped_count
        # Most of the time is waiting for the disk.
        kept = map_in_threads(keep, scan.files, _THREADS, "quark-directory")
        files = [file for file in kept if file is not None]
        if scan.skipped_count > skipped_before:
            self._tell_skipped(intake, scan)
        total = sum(file["size_bytes"] for file in files)
        facts: dict[str, Any] = {"files": len(files), "total_bytes": total}
        if scan.skipped_count:
            facts["skipped"] = scan.skipped_count
        if changed := sum("changed_while_read" in file for file in files):
            facts["changed_while_read"] = changed
        if lost := sum(NOT_KEPT in file for file in files):
            facts["files_not_kept"] = lost
            self._tell_lost(intake, lost)
        manifest: dict[str, Any] = {"files": files}
        if scan.skipped:
            manifest["skipped"] = scan.skipped
        return self._keep_json(intake, manifest, facts)

    def _keep_directory_file(self, intake: Intake, relative: str, place: Path) -> dict[str, Any]:
        """One file, unless it is kept already; returns its entry in the manifest."""
        opened = open_file(place)
        found = os.fstat(opened.source.fileno())
        mark = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        known = self._kept_files.get(mark)
        self._background.advance()
        if known is not None:
            opened.source.close()
            return {"path": relative, "size_bytes": found.st_size, "sha256": known}
        key = _make_key(intake.key, relative)
        record = self._keep_opened(intake._replace(key=key), opened, named=False)
        entry = {"path": relative, "size_bytes": record.size_bytes, "sha256": record.sha256}
        said: Mapping[str, Any] = record.metadata or {}
        if said.get("changed_while_read"):
            entry["changed_while_read"] = True
        if NOT_KEPT in said:
            entry[NOT_KEPT] = said[NOT_KEPT]
        elif (
            not said.get("changed_while_read")
            # What was written just now may be written again within the same tick of its clock.
            and time.time_ns() - found.st_ctime_ns > _SETTLED_NS
            and len(self._kept_files) < _MOST_MARKS
        ):
            self._kept_files[mark] = record.sha256
        return entry

    def _tell_lost(self, intake: Intake, lost: int) -> None:
        message = f"{lost} files of the directory could not be stored, because the disk is full"
        if self._run.strict:
            raise SessionStoreError(f"log_directory: {intake.key!r}: {message}. Free disk space.")
        self._tell_failure(intake.key, SessionStoreError(message))

    def _tell_skipped(self, intake: Intake, scan: DirectoryScan) -> None:
        first = next(reversed(scan.skipped.items()), ("", ""))
        self._tell_failure(
            intake.key,
            SchemaValidationError(
                f"{scan.skipped_count} files are omitted, such as {first[0]}: {first[1]}"
            ),
        )


def check_patterns(exclude: object) -> tuple[str, ...]:
    """Patterns of what is left out of a directory.

    Raises:
        SchemaValidationError: Not a sequence of str.
    """
    given: Any = exclude
    patterns = tuple(given) if isinstance(exclude, Sequence) else ()
    if isinstance(exclude, str) or not all(isinstance(each, str) for each in patterns):
        raise SchemaValidationError(
            f"exclude must be a sequence of patterns, such as ('*.tmp',), got {exclude!r:.80}"
        )
    return patterns


def _make_key(directory: str, relative: str) -> str:
    """The key of a file in a directory: its path, or where that is no key, a digest of it."""
    key = encode_name(f"{directory}/{relative}")
    if len(key) <= MAX_NAME_LENGTH and split_path(key) is not None:
        return key
    return f"{directory}/{hashlib.sha256(relative.encode('utf-8', 'replace')).hexdigest()[:16]}"


class ArtifactStore(MediaArtifacts, RecordingArtifacts, EvaluationArtifacts, CollectionArtifacts):
    """Writer and reader of a run's artifacts. Thread-safe.

    A payload is hashed and written to disk before the call returns, so later changes of the object
    have no effect. Equal payloads of a run are stored once (see `ARTIFACT_STORAGE_LAYOUT`). A
    payload may have up to QUARK_ARTIFACT_MAX_BYTES (50 GB). `log_directory` and `log_video` of a
    file return a `PendingArtifact` earlier; `close()` and the end of the run wait for it.

    Artifacts with the same key are versions `v0`, `v1`, ... in the project. `session.use_artifact`
    finds them by number or alias.

    If the disk is full, the call raises in strict mode. Otherwise it logs an `artifact_not_kept`
    event, and the record has no payload path.

    Args:
        session: A TrainingSession, or its RunContext.
        retention_hooks: Functions called with this store and each stored record, in order.
            Artifacts that a hook stores do not call hooks.
        raise_on_retention_error: Whether a failed hook raises RetentionHookError. Otherwise a
            `retention_hook_failed` event is logged. Defaults to the run's `strict_mode`.

    Raises:
        SchemaValidationError: An argument is invalid. The message names it.
    """

    def store(
        self,
        artifact_type: str,
        name: str,
        payload: Any,
        *,
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        payload_format: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
        aliases: Sequence[str] | None = (),
    ) -> ArtifactRecord:
        """Store one artifact.

        Args:
            artifact_type: Type, such as "tensor_summary": letters, digits, `.`, `_`, `-`.
            name: Name, or full key (`layers/encoder/weights`).
            payload: JSON values, a str, or a bytes-like object.
            step: Step. Defaults to the step set by `session.step`, or None.
            epoch: Epoch, or None.
            namespace: Prefix of the name, or None.
            payload_format: `json`, `text` or `bytes`. Defaults to the type of the payload.
            metadata: JSON values; copied.
            timestamp: Time as ISO 8601 text. Defaults to now.
            aliases: Names for this version, such as "best". See `set_alias`.

        Returns:
            The record of the artifact.

        Raises:
            SchemaValidationError: An argument is invalid, or the payload does not fit its format or
                is too large. The message names it.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        named = check_aliases(aliases)
        place = Placement(
            step=step, epoch=epoch, namespace=namespace, metadata=metadata, timestamp=timestamp
        )
        intake = self._check("store", artifact_type, name, **place)
        chosen = choose_format(payload, payload_format)
        data = encode_payload(payload, chosen)
        return self._name(self._keep_bytes(intake, chosen, EXTENSIONS[chosen], data), named)

    @spell_out(Placement, before="aliases")
    def store_file(
        self,
        artifact_type: str,
        name: str,
        path: str | Path,
        *,
        aliases: Sequence[str] | None = (),
        **place: Unpack[Placement],
    ) -> ArtifactRecord:
        """Store a file of any size.

        A file that grows during the call is stored with its size at the start. A file that is
        modified has `changed_while_read` in its metadata.

        Args:
            artifact_type: Type, such as "checkpoint".
            name: Name, or full key.
            path: Path of a regular file.
            aliases: Names for this version, such as "best".
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Returns:
            The record: format bytes.

        Raises:
            SchemaValidationError: An argument is invalid, or the file does not exist.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        named = check_aliases(aliases)
        intake = self._check("store_file", artifact_type, name, **place)
        return self._name(self._keep_file(intake, path), named)

    def log_snapshot(
        self,
        name: str,
        payload: Any,
        *,
        snapshot_type: str = "batch_diagnostics_snapshot",
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        payload_format: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Store a snapshot: `store` with `snapshot_type` as the type.

        Args:
            name: Name, or full key.
            payload: JSON values, a str, or a bytes-like object.
            snapshot_type: Type of the artifact. Defaults to "batch_diagnostics_snapshot".
            payload_format: `json`, `text` or `bytes`. Defaults to the type of the payload.
            step, epoch, namespace, metadata, timestamp: See `ArtifactStore.store`.

        Raises:
            SchemaValidationError: An argument is invalid, or the payload does not fit its format or
                is too large.
            InvalidRunStateError: The store is closed or the run has ended.
            SessionStoreError: In strict mode, the payload cannot be stored.
            RetentionHookError: A retention hook raised, and `raise_on_retention_error` is set.
        """
        check_artifact_type(snapshot_type, "snapshot_type")
        place = Placement(
            step=step, epoch=epoch, namespace=namespace, metadata=metadata, timestamp=timestamp
        )
        return self.store(snapshot_type, name, payload, payload_format=payload_format, **place)
