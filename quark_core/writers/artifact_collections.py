"""Directories as artifacts, and files that stay where they are."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark_core.artifacts.directories import DirectoryScan, describe_reference, scan_directory
from quark_core.artifacts.payloads import encode_payload
from quark_core.config.redaction import redact_object
from quark_core.errors import SchemaValidationError, SessionStoreError
from quark_core.records import ArtifactRecord
from quark_core.records.artifact_layout import split_path
from quark_core.records.json_object import normalize_object
from quark_core.records.names import MAX_NAME_LENGTH, encode_name
from quark_core.writers.artifact_background import PendingArtifact, map_in_threads
from quark_core.writers.artifact_intake import Intake, describe_intake, open_file
from quark_core.writers.artifact_links import LinkedArtifacts, check_aliases
from quark_core.writers.artifact_reading import NOT_KEPT

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

    def log_directory(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        exclude: Sequence[str] = (),
        aliases: Sequence[str] | None = (),
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> PendingArtifact:
        """Store a directory as one artifact: a manifest, and each file that is not kept yet.

        The names are looked up before this returns, the files are stored by a thread. The
        manifest comes last: a directory that was broken off is none. A file that this run keeps
        already costs reading it, and one that nobody has touched since not even that.

        What cannot be read, is no regular file, or leads around in a circle is left out, with a
        warning, and listed in the manifest; a file that changes meanwhile is marked there.

        Args:
            path: The directory; with 100,000 files at most.
            name: Its name, or its whole key; the directory's name by default.
            exclude: Patterns of what is left out, such as `*.tmp` or `.git/*`.
            aliases: Names for this version, such as `best`.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            A PendingArtifact: its `wait()` gives the record, of type `directory`, json:
            `{"files": [{"path", "size_bytes", "sha256"}], "skipped": {path: reason}}`.

        Raises:
            SchemaValidationError: No such directory, or another bad argument.
            InvalidRunStateError: As in `store`.
        """
        named = check_aliases(aliases)
        patterns = check_patterns(exclude)
        given: Any = path
        try:
            found_name = Path(os.fsdecode(os.fspath(given))).absolute().name
        except TypeError:
            raise SchemaValidationError(f"path must be a path, not {type(path).__name__}") from None
        intake = self._check(
            "log_directory",
            DIRECTORY,
            found_name if name is None else name,
            namespace,
            step,
            epoch,
            metadata,
            timestamp,
        )
        scan = scan_directory(path, patterns)
        if scan.skipped_count:
            first = next(iter(scan.skipped.items()), ("", ""))
            warnings.warn(
                f"log_directory {scan.root}: {scan.skipped_count} are left out, such as "
                f"{first[0]!r:.200} ({first[1]})",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._background.submit(
            intake.key, lambda: self._name(self._keep_directory(intake, scan), named)
        )

    def log_reference(
        self,
        name: str,
        uri: str | Path,
        *,
        size_bytes: int | None = None,
        sha256: str | None = None,
        etag: str | None = None,
        aliases: Sequence[str] | None = (),
        step: int | None = None,
        epoch: int | None = None,
        namespace: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        timestamp: str | None = None,
    ) -> ArtifactRecord:
        """Note where a file lies that stays there: `s3://...`, `https://...`, or a path.

        Nothing is read over a network. Of a path size and time are looked up and, up to 64 MB,
        the hash; secrets in an address are taken out. Returns at once.

        Args:
            name: Its name, or its whole key.
            uri: The address, or the path of a file or directory.
            size_bytes, sha256, etag: What is known of it besides.
            aliases: Names for this version, such as `best`.
            step, epoch, namespace, metadata, timestamp: As in `store`.

        Returns:
            The record: type `reference`, json `{"uri", "size_bytes", "sha256", ...}`, which is
            in its metadata too.

        Raises:
            SchemaValidationError: No address, or another bad argument.
            InvalidRunStateError, SessionStoreError, RetentionHookError: As in `store`.
        """
        named = check_aliases(aliases)
        intake = self._check(
            "log_reference", REFERENCE, name, namespace, step, epoch, metadata, timestamp
        )
        found = describe_reference(uri, size_bytes, sha256, etag)
        told: Mapping[str, Any] = redact_object(normalize_object(found, "uri")) or {}
        payload = encode_payload(told, "json")
        described = describe_intake(intake, {"reference": told})
        return self._name(self._keep_bytes(described, "json", "json", payload), named)

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
        payload = encode_payload(manifest, "json")
        return self._keep_bytes(describe_intake(intake, facts), "json", "json", payload)

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
        message = f"{lost} files of the directory could not be kept, for want of room on the disk"
        if self._run.strict:
            raise SessionStoreError(f"log_directory: {intake.key!r}: {message}. Make room.")
        self._tell_failure(intake.key, SessionStoreError(message))

    def _tell_skipped(self, intake: Intake, scan: DirectoryScan) -> None:
        first = next(reversed(scan.skipped.items()), ("", ""))
        self._tell_failure(
            intake.key,
            SchemaValidationError(
                f"{scan.skipped_count} files are left out, such as {first[0]}: {first[1]}"
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
