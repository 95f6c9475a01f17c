"""Aliases of artifacts, and that a run has used one: records that link to a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quark_core.errors import ArtifactNotFoundError, SchemaValidationError
from quark_core.records import ArtifactRecord
from quark_core.records.artifact_links import check_alias
from quark_core.records.kinds.artifact_links import ArtifactLinkRecord
from quark_core.writers.artifact_intake import ArtifactIntake, hide_secrets
from quark_core.writers.artifact_reading import ArtifactReading

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun


class LinkedArtifacts(ArtifactIntake, ArtifactReading):
    """What gives an artifact its aliases; see `ArtifactStore`."""

    def set_alias(self, artifact: str | ArtifactRecord, alias: str) -> None:
        """Let an alias name an artifact of this run, and no other of its name in the project.

        From then on `session.use_artifact("name:alias")` finds it, in every run of the project.
        Returns at once.

        Args:
            artifact: A record, or its id.
            alias: Such as `best`: letters, digits, `.`, `_`, `-`; not `latest`, which is
                always the newest version, and not `v3`, which is a number.

        Raises:
            SchemaValidationError: A bad argument.
            ArtifactNotFoundError: No such artifact.
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
            f"artifact {record.artifact_key!r}: this rank does not know the id of its run"
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
