"""Versions of artifacts over the runs of a project: their numbers, aliases, and who uses them.

What is logged under one key is counted through the whole project, in the order of time: v0, v1
and so on. The same payload again is no new version. Nothing is counted when something is logged:
numbers and aliases are worked out of the records when somebody asks. A number that was used, or
given an alias, is kept with that record, and stays what it is, whichever run is removed or comes
late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quark_core.errors import ArtifactNotFoundError, RunNotFoundError
from quark_core.records import ArtifactRecord
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.records.names import (
    KEPT_SOURCES,
    LATEST,
    ArtifactName,
    decode_name,
    encode_artifact_key,
)
from quark_core.records.query import Query
from quark_core.runs.reading import iterate
from quark_core.runs.run_ids import name_store

if TYPE_CHECKING:
    from quark_core.backends.contract import SupportsRead
    from quark_core.backends.run_summary import StoredRun

HIDDEN_TYPES = frozenset({"directory_file", "image_mask", "table_image", KEPT_SOURCES})
"""Types of artifacts that are parts of others, and have no versions of their own."""

_MOST_TOLD = 10
_MOST_RECORDS = 50_000
_PART_ROWS = 4_096


@dataclass(frozen=True, slots=True)
class ArtifactVersion:
    """One version of an artifact.

    Attributes:
        key: Stored key of the artifact.
        number: Number of the version in the project, from 0.
        record: Record of the artifact. If the same payload was logged repeatedly, the first record.
        run_name: Name of the run that logged it, or None.
        aliases: Aliases, sorted; includes `latest` for the newest version.
        used_by: IDs of the runs that used it, in order of time.
    """

    key: str
    number: int
    record: ArtifactRecord
    run_name: str | None = None
    aliases: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name with version, such as `model:v3`."""
        return f"{decode_name(self.key)}:v{self.number}"

    def to_dict(self) -> dict[str, Any]:
        """Return the version as a new dict of JSON values."""
        return {
            "name": self.name,
            "version": self.number,
            "aliases": list(self.aliases),
            "run_name": self.run_name,
            "used_by": list(self.used_by),
            "artifact": self.record.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class RunLineage:
    """What a run has made and used.

    Attributes:
        made: Versions that it has logged.
        used: Versions that it has used.
        gone: Names that it has used of runs that are no longer there.
    """

    made: tuple[ArtifactVersion, ...] = ()
    used: tuple[ArtifactVersion, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    """The records of one key."""

    records: list[ArtifactRecord] = field(default_factory=list)
    links: list[ArtifactLinkRecord] = field(default_factory=list)


def list_versions(
    reader: SupportsRead, project: str, key: str | None = None
) -> list[ArtifactVersion]:
    """The versions of a project's artifacts, by key and number.

    Reads the artifacts of each run of the project.

    Args:
        reader: An opened backend that reads.
        project: Name of the project.
        key: Only this artifact, as it was given or as it is stored.

    Raises:
        SchemaValidationError: A key that is none.
        SessionStoreError: The store cannot be read.
    """
    runs = {str(stored.run.id): stored for stored in reader.list_runs(project=project)}
    found = _collect(reader, runs, key)
    return [
        version for name in sorted(found) for version in _count_versions(name, found[name], runs)
    ]


def find_version(reader: SupportsRead, project: str, name: ArtifactName) -> ArtifactVersion:
    """The version that a name such as `model:best` means in a project.

    Raises:
        ArtifactNotFoundError: There is none; the message says what there is.
        SessionStoreError: The store cannot be read.
    """
    versions = list_versions(reader, project, name.key)
    for version in reversed(versions):
        if name.version == version.number or name.alias in version.aliases:
            return version
    where = name_store(reader)
    if not versions:
        raise ArtifactNotFoundError(
            f"project {project!r} has no artifact {name.key!r:.200} in {where}"
        )
    aliases = sorted({alias for version in versions for alias in version.aliases})
    numbers = ", ".join(f"v{version.number}" for version in versions[-_MOST_TOLD:])
    newest = "the newest are " if len(versions) > _MOST_TOLD else ""
    raise ArtifactNotFoundError(
        f"project {project!r} has no {str(name)!r:.200} in {where}: its aliases are "
        f"{', '.join(aliases)}, and its versions {newest}{numbers}"
    )


def list_lineage(reader: SupportsRead, run_id: str) -> RunLineage:
    """What a run has made, and what it has used, with who uses it besides.

    Raises:
        RunNotFoundError: There is no such run.
        SessionStoreError: The store cannot be read.
    """
    stored = reader.load_run(run_id)
    links: Any = _read(reader, run_id, ArtifactLinkRecord.KIND, Query(equals={"relation": "used"}))
    versions = list_versions(reader, stored.project.name)
    made = tuple(version for version in versions if version.record.run_id == run_id)
    by_id = {version.record.id: version for version in versions}
    by_number = {(version.key, version.number): version for version in versions}
    used: dict[str, ArtifactVersion] = {}
    gone: dict[str, None] = {}
    for link in links:
        version = by_id.get(link.artifact_id) or by_number.get((link.artifact_key, link.version))
        if version is not None and version.record.sha256 == link.sha256:
            used[version.record.id] = version
        else:
            number = "" if link.version is None else f":v{link.version}"
            gone[f"{decode_name(link.artifact_key)}{number} of run {link.artifact_run_id}"] = None
    return RunLineage(made, tuple(used.values()), tuple(gone))


def _collect(
    reader: SupportsRead, runs: Mapping[str, StoredRun], key: str | None
) -> dict[str, _Found]:
    any_of = {"artifact_key": encode_artifact_key(key, "key")}
    found: dict[str, _Found] = {}
    # What a resumed attempt hides has had its number before.
    query = Query.build(any_of=any_of, all_attempts=True)
    # Links first: whatever one of them names is there by the time that the artifacts are read.
    for run_id in runs:
        for link in _read(reader, run_id, ArtifactLinkRecord.KIND, query):
            found.setdefault(link.artifact_key, _Found()).links.append(link)
    for run_id in runs:
        for record in _read(reader, run_id, ArtifactRecord.KIND, query):
            found.setdefault(record.artifact_key, _Found()).records.append(record)
    return found


def _read(reader: SupportsRead, run_id: str, kind: str, query: Query) -> Iterable[Any]:
    """Records of a run that have versions, in order; of very many the newest.

    Read in parts: a directory of files has a record for each, and somebody may have sent millions.
    """
    import numpy as np

    kept: deque[Any] = deque(maxlen=_MOST_RECORDS)
    try:
        for part in iterate(reader, run_id, kind, query, _PART_ROWS):
            if kind == ArtifactRecord.KIND:
                types = part["artifact_type"].tolist()
                part = part.take(np.array([name not in HIDDEN_TYPES for name in types], dtype=bool))
            kept.extend(part.to_records())
    except RunNotFoundError:
        return ()  # removed meanwhile
    return kept


def _count_versions(
    key: str, found: _Found, runs: Mapping[str, StoredRun]
) -> Iterable[ArtifactVersion]:
    links = sorted(found.links, key=_place)
    pins = {link.artifact_id: link.version for link in links if link.version is not None}
    taken = set(pins.values())
    versions: list[ArtifactVersion] = []
    same: dict[str, int] = {}
    number = 0
    for record in sorted(found.records, key=_place):
        pin = pins.get(record.id)
        if versions and pin is None and versions[-1].record.sha256 == record.sha256:
            same[record.id] = len(versions) - 1
            continue
        while pin is None and number in taken:
            number += 1
        mine = number if pin is None else pin
        same[record.id] = len(versions)
        run = runs.get(str(record.run_id))
        versions.append(ArtifactVersion(key, mine, record, None if run is None else run.run.name))
        number = max(number, mine + 1)
    return _name_versions(versions, same, links)


def _name_versions(
    versions: list[ArtifactVersion], same: Mapping[str, int], links: Sequence[ArtifactLinkRecord]
) -> list[ArtifactVersion]:
    """The versions in the order of their numbers, with their aliases and users."""
    aliases: dict[str, int] = {}
    users: dict[int, dict[str, None]] = {}
    for link in links:
        place = same.get(link.artifact_id)
        if place is None:
            # Of a run that is gone: whoever has the alias now has it from somebody else.
            if link.relation == "alias" and link.alias is not None:
                aliases.pop(link.alias, None)
        elif link.relation == "used":
            users.setdefault(place, {})[str(link.run_id)] = None
        elif link.relation == "alias" and link.alias is not None:
            aliases[link.alias] = place
        elif link.alias is not None and aliases.get(link.alias) == place:
            del aliases[link.alias]
    if versions:
        aliases[LATEST] = max(range(len(versions)), key=lambda at: versions[at].number)
    named: dict[int, list[str]] = {}
    for alias, place in aliases.items():
        named.setdefault(place, []).append(alias)
    full = [
        replace(
            version,
            aliases=tuple(sorted(named.get(place, ()))),
            used_by=tuple(users.get(place, ())),
        )
        for place, version in enumerate(versions)
    ]
    return sorted(full, key=lambda version: version.number)


def _place(record: Any) -> tuple[int, str, str, int]:
    return record.time_us, str(record.run_id), record.writer_id, record.sequence
