"""How far a run of ours has come at the tool that it is imported from.

Each group of batches that is stored ends with a lifecycle record `import`, which holds this:
whoever imports the run the next time begins behind it. Two who import one run at once write
as the same writer, so that the store takes the batches of one of them; the other one finds
another token than its own in the newest record, and goes on from there.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

import msgspec

from quark_core.backends.contract import SupportsRead
from quark_core.records import LifecycleRecord
from quark_core.records.query import Query

ACTION = "import"
"""The lifecycle action of the record."""

_ID_DIGITS = 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_NEWEST = Query(equals={"action": ACTION}, all_attempts=True)


class Story(msgspec.Struct, kw_only=True):
    """State of one run's import.

    Attributes:
        tool: The tool.
        position: As `Portion.position`.
        attempt: Attempt that is being read.
        number: Number of the next batch of the attempt's writer.
        sequences: Kind -> sequence of its next record.
        said: What the tool has said of the run, as far as it was taken over.
        token: Of who has written it, drawn anew for each group.
    """

    tool: str
    position: dict[str, Any] = msgspec.field(default_factory=dict)
    attempt: int = 0
    number: int = 0
    sequences: dict[str, int] = msgspec.field(default_factory=dict)
    said: dict[str, Any] = msgspec.field(default_factory=dict)
    token: str = ""

    def copy(self) -> Story:
        """A copy to be changed, with a token of its own."""
        changed = msgspec.structs.replace(self, token=secrets.token_hex(8))
        changed.sequences, changed.said = dict(self.sequences), dict(self.said)
        return changed

    def begin_attempt(self) -> None:
        """The next attempt has a writer of its own."""
        self.attempt, self.number, self.sequences = self.attempt + 1, 0, {}

    def take(self, kind: str, count: int) -> tuple[int, int]:
        """Number of a batch of so many records, and the sequence of the first one."""
        number, first = self.number, self.sequences.get(kind, 0)
        self.number, self.sequences[kind] = number + 1, first + count
        return number, first

    def name_writer(self, run_id: str) -> str:
        """The writer of the attempt: the same for everybody who imports the run."""
        return f"import{self.attempt}-{run_id}"


def is_run_id(text: object) -> bool:
    """Whether it may be an id of ours: what somebody else has written may be a path."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def derive_run_id(tool: str, identity: str) -> str:
    """The id of a run of ours that stands for one of a tool."""
    text = f"{tool}\0{identity}".encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:_ID_DIGITS]


def load_story(store: SupportsRead, run_id: str) -> Story | None:
    """What is known of a run's import; None where the run was not imported.

    Raises:
        RunNotFoundError: The store has no such run.
        SessionStoreError: It cannot be read.
    """
    columns = store.read(run_id, LifecycleRecord.KIND, _NEWEST)
    records = columns.to_records()
    if not records:
        return None
    newest: Any = records[-1]
    return msgspec.convert(dict(newest.data or {}), Story)
