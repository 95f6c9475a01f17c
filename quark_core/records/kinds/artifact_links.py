"""Links of artifacts: the runs that have used one, and the aliases that name one."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from quark_core.errors import SchemaValidationError
from quark_core.records.base import FieldRules, StreamRecord
from quark_core.records.json_object import JsonObject
from quark_core.records.names import MOST_PINNED, is_sha256

ArtifactRelation = Literal["used", "alias", "unalias"]


class ArtifactLinkRecord(StreamRecord, frozen=True, gc=False):
    """One link to a version of an artifact, of this run or another one.

    Attributes:
        relation: used: the run that has this record has used the version. alias: from now on
            the alias names it, and no other version of this name in the project. unalias: it
            no longer does.
        artifact_key: The artifact's whole name.
        artifact_run_id: The run that has logged it.
        artifact_id: Id of its `ArtifactRecord`.
        sha256: Hash of its payload.
        version: Its number when the link was made, which it keeps from then on; None where
            nobody had counted.
        alias: The alias; of a use the one by which it was asked for, or None.
        step, epoch: Counters, or None.
        metadata: JSON values, or None.
    """

    relation: str
    artifact_key: str
    artifact_run_id: str
    artifact_id: str
    sha256: str
    version: int | None = None
    alias: str | None = None
    step: int | None = None
    epoch: int | None = None
    metadata: JsonObject | None = None

    KIND: ClassVar[str] = "artifact_link"
    TABLE: ClassVar[str] = "artifact_links"
    HAS_FIGURES: ClassVar[bool] = False
    RULES: ClassVar[FieldRules] = FieldRules(
        names=("artifact_key",),
        words={"relation": get_args(ArtifactRelation)},
        plain=("artifact_run_id", "artifact_id", "sha256", "alias"),
    )

    def check(self) -> None:
        """Refuse a link to nothing, and an alias without a name."""
        name = type(self).__name__
        if not is_sha256(self.sha256):
            raise SchemaValidationError(f"{name}.sha256 must be 64 lowercase hexadecimal digits")
        if self.version is not None and not 0 <= self.version <= MOST_PINNED:
            raise SchemaValidationError(
                f"{name}.version must be from 0 to {MOST_PINNED}, got {self.version}"
            )
        if self.relation != "used" and self.alias is None:
            raise SchemaValidationError(f"{name}.alias is required for an alias")
