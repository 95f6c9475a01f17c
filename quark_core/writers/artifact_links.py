"""Aliases of artifacts, and artifacts that a run uses: another run's, or its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

import msgspec

from quark_core.artifacts.payload_folder import OutputFolder, make_file_name
from quark_core.backends.contract import SupportsArtifacts, SupportsRead
from quark_core.config.arguments import check_label
from quark_core.errors import ArtifactNotFoundError, SchemaValidationError, SessionStoreError
from quark_core.records import ArtifactRecord
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.records.names import (
    MOST_PINNED,
    check_alias,
    decode_name,
    is_sha256,
    object_path,
    parse_artifact_name,
    split_path,
)
from quark_core.runs.artifact_versions import ArtifactVersion, find_version
from quark_core.runs.open_run import open_runs
from quark_core.runs.step_counters import read_step
from quark_core.writers import artifact_reading as reading
from quark_core.writers.artifact_reading import ArtifactReading
from quark_core.writers.artifact_writing import ArtifactIntake, hide_secrets

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun
    from quark_core.runs.run_reader import RunReader


class LinkedArtifacts(ArtifactIntake, ArtifactReading):
    """What gives an artifact its aliases; see `ArtifactStore`."""

    def set_alias(self, artifact: str | ArtifactRecord, alias: str) -> None:
        """Set an alias for an artifact of this run, and remove it from other versions.

        `session.use_artifact("name:alias")` then finds this version in each run of the project.
        Returns at once.

        Args:
            artifact: Record of the artifact, or its ID.
            alias: Alias such as "best": letters, digits, `.`, `_`, `-`. `latest` and names like
                `v3` are reserved.

        Raises:
            SchemaValidationError: An argument is invalid. The message names it.
            ArtifactNotFoundError: The artifact does not exist.
            InvalidRunStateError: The store is closed or the run has ended.
        """
        self._check_open("set_alias")
        self._name(self._find(artifact), check_aliases((alias,)))

    def _name(self, record: ArtifactRecord, aliases: Iterable[str]) -> ArtifactRecord:
        """Give a record that is out its aliases."""
        for alias in aliases:
            put_link(self._run, "alias", record, alias=alias)
        return record


def check_aliases(aliases: object) -> tuple[str, ...]:
    """Aliases as they are kept.

    Raises:
        SchemaValidationError: Not a sequence of aliases, nor None.
    """
    if aliases is None:
        return ()
    if isinstance(aliases, (str, bytes)) or not isinstance(aliases, Iterable):
        raise SchemaValidationError(
            f"aliases must be a sequence of str, such as ('best',), not {type(aliases).__name__}"
        )
    return tuple(dict.fromkeys(check_alias(hide_secrets(alias)) for alias in aliases))


def put_link(
    run: OpenRun,
    relation: str,
    record: ArtifactRecord,
    *,
    alias: str | None = None,
    version: int | None = None,
    step: int | None = None,
) -> None:
    """Put a link to a version of an artifact into a run's stream.

    Raises:
        ArtifactNotFoundError: The artifact belongs to a run that has no id here.
    """
    if record.run_id is None:
        raise ArtifactNotFoundError(
            f"artifact {record.artifact_key!r}: this rank does not know the ID of its run"
        )
    run.emit(
        ArtifactLinkRecord,
        relation,
        record.artifact_key,
        record.run_id,
        record.id,
        record.sha256,
        version,
        alias,
        step,
    )


_DIRECTORY, _REFERENCE = "directory", "reference"
_FILES = "files"


class UsedArtifact:
    """Version of an artifact to read, returned by `session.use_artifact`.

    Thread-safe.

    Attributes:
        version: The version: number, aliases and users.
        record: Record of the artifact.
    """

    def __init__(self, run: OpenRun, version: ArtifactVersion) -> None:
        self._run = run
        self.version = version
        self.record = version.record
        self._copied: Path | None = None

    @property
    def name(self) -> str:
        """Name with version, such as `model:v3`."""
        return self.version.name

    @property
    def uri(self) -> str | None:
        """URI of the file for a reference, else None."""
        if self.record.artifact_type != _REFERENCE:
            return None
        found: Any = self.load()
        return str(found["uri"])

    @property
    def path(self) -> Path:
        """Path on this machine: a file, or a folder for a directory artifact.

        A payload of a local store is at its original place; do not write to it. Others are copied
        once into a temporary folder, which is removed at process exit. For a reference to a local
        file, it is that file, after a check for changes.

        Raises:
            ArtifactNotFoundError: The payload is not stored, or the referenced file does not exist.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
        """
        if self.record.artifact_type == _REFERENCE:
            return self._find_referred()
        if self.record.artifact_type != _DIRECTORY:
            directory = self._find_directory()
            found = None if directory is None else directory / object_path(self.record.sha256)
            if found is not None and found.is_file():
                reading.open_payload(self._run, self.record).close()
                return found
        if self._copied is None:
            folder = tempfile.mkdtemp(prefix="quark-artifact-")
            # Not with this object: `use_artifact(…).path` is all that many keep.
            weakref.finalize(self._run, shutil.rmtree, folder, ignore_errors=True)
            self._copied = self.copy_to(folder)
        return self._copied

    def read(self) -> bytes:
        """Return the payload as bytes; for a directory or reference, its JSON.

        Raises:
            ArtifactNotFoundError: The payload is not stored.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
        """
        with self.open() as file:
            return file.read()

    def load(self) -> Any:
        """Return the stored value: dicts and lists for JSON, str for text, or bytes.

        Raises:
            ArtifactNotFoundError: The payload is not stored.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
        """
        return reading.load_payload(self._run, self.record)

    def open(self) -> BinaryIO:
        """Open the payload as a seekable binary file, after a check of its hash.

        Raises:
            ArtifactNotFoundError: The payload is not stored.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
        """
        return reading.open_payload(self._run, self.record)

    def copy_to(self, folder: str | Path) -> Path:
        """Copy the artifact into a folder, without replacing existing files.

        Args:
            folder: The folder.

        Returns:
            Path of the file, or of the folder for a directory artifact.

        Raises:
            ArtifactNotFoundError: The payload is not stored.
            ArtifactDamagedError: The payload does not match its stored hash.
            SessionStoreError: The store cannot be read.
            OSError: The folder cannot be written.
        """
        return copy_version(self._run, self.record, Path(folder))

    def __repr__(self) -> str:
        return f"UsedArtifact({self.name!r}, {self.record.size_bytes} bytes)"

    def _find_directory(self) -> Path | None:
        reader: object = self._run.reader
        if not isinstance(reader, SupportsArtifacts) or self.record.run_id is None:
            return None
        return reader.payload_directory(self.record.run_id)

    def _find_referred(self) -> Path:
        found: Any = self.load()
        scheme, _, rest = str(found.get("uri")).partition("://")
        if scheme != "file":
            raise ArtifactNotFoundError(
                f"{self.name} refers to {found.get('uri')!r:.300}, which is not on this "
                "machine. Fetch it with the tool that stores it (`.uri` is the address)"
            )
        place = Path(unquote(rest))
        size_bytes = found.get("size_bytes")
        if not place.exists():
            raise ArtifactNotFoundError(f"{self.name} refers to {place}, which does not exist")
        if size_bytes is not None and place.is_file() and place.stat().st_size != size_bytes:
            raise ArtifactNotFoundError(
                f"{self.name} refers to {place}, which has {place.stat().st_size} bytes now, "
                f"but had {size_bytes}"
            )
        return place


def use_artifact(run: OpenRun, name: object, project: object, step: object) -> UsedArtifact:
    """Find a version of an artifact, and note that the run uses it; see `TrainingSession`.

    Raises:
        SchemaValidationError: A bad argument.
        ArtifactNotFoundError: No such version.
        InvalidRunStateError: The run has ended.
        SessionStoreError: The store cannot be read.
    """
    wanted = parse_artifact_name(name)
    at = read_step(run, step)
    chosen = run.context.project_name if project is None else check_label(project, "project")
    if run.refusal is not None:
        run.refuse("use_artifact")
    version = look_up(run, wanted, chosen)
    number = version.number if version.number <= MOST_PINNED else None
    put_link(run, "used", version.record, alias=wanted.alias, version=number, step=at)
    return UsedArtifact(run, version)


def look_up(run: OpenRun, wanted: Any, project: str) -> ArtifactVersion:
    """The version of a project that is meant, as the run's store knows it.

    Raises:
        As `use_artifact`.
    """
    if run.forked:
        raise SessionStoreError(
            "a forked process can log to its parent's run but not read it. Read the artifact in "
            "the parent, or in a spawned process"
        )
    reader: object = run.reader
    if not isinstance(reader, SupportsRead):
        raise ArtifactNotFoundError(f"{wanted}: this run stores nothing and reads nothing")
    # What other runs of this process have logged is found too.
    for each in {run, *(session.open_run for session in open_runs.sessions)}:
        if each.refusal is None and not each.forked:
            each.flush()
    return find_version(reader, project, wanted)


def copy_version(run: OpenRun | RunReader, record: ArtifactRecord, folder: Path) -> Path:
    """Copy an artifact into a folder; see `UsedArtifact.copy_to`.

    Raises:
        As `UsedArtifact.copy_to`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if record.artifact_type != _DIRECTORY:
        name = decode_name(record.artifact_name)
        # Of whoever has made it: no hidden file, such as a shell would run at its next start.
        target = folder / make_file_name(
            Path(name).name if split_path(name) else record.sha256[:16]
        )
        if os.path.lexists(target):
            raise SchemaValidationError(f"folder: {target} already exists and is not replaced")
        return reading.copy_payload(run, record, target)
    output = OutputFolder(folder)
    for file in list_files(run, record):
        parts = split_path(file["path"])
        part = msgspec.structs.replace(
            record, sha256=file["sha256"], size_bytes=file["size_bytes"], payload_format="bytes"
        )
        assert parts is not None
        with reading.open_payload(run, part) as source, output.write(parts) as copy:
            while piece := source.read(1024 * 1024):
                copy.write(piece)
    return folder


def list_files(run: OpenRun | RunReader, record: ArtifactRecord) -> list[dict[str, Any]]:
    """The files of a directory; what a manifest says is anybody's, and looked at first.

    Raises:
        ArtifactNotFoundError: It is no manifest, a path in it leads elsewhere, or a file was
            not kept.
    """
    manifest: Any = reading.load_payload(run, record)
    files = manifest.get(_FILES) if isinstance(manifest, Mapping) else None
    if not isinstance(files, list):
        raise ArtifactNotFoundError(f"artifact {record.artifact_key!r} is not a directory")
    for file in files:
        path = file.get("path") if isinstance(file, Mapping) else None
        if (
            not isinstance(path, str)
            or split_path(path) is None
            or not is_sha256(str(file.get("sha256")))
            or not isinstance(file.get("size_bytes"), int)
        ):
            raise ArtifactNotFoundError(
                f"artifact {record.artifact_key!r}: its manifest has an invalid path: {path!r:.200}"
            )
        if reading.NOT_KEPT in file:
            raise ArtifactNotFoundError(
                f"artifact {record.artifact_key!r}: {path} was not stored: {file[reading.NOT_KEPT]}"
            )
    return files
