"""Runs of another tool in a neutral form, which is all that an importer has to give.

To add a tool, write a module in `quark.importing.sources` with

- a class of `ForeignRun`: `describe` says what is known of the run, and `read` yields what
  it holds as portions, from a position on that an earlier portion has named;
- a function that finds the runs at a place: `find_runs(place, …) -> Iterator[ForeignRun]`,
  called again and again while somebody watches, so that it finds new ones;

and a command in `quark.cli.import_runs`, which hands that function to `run_import`. All else
is shared, in `quark.importing.importer`: which run of ours it is, that it comes once however
often and from however many processes it is imported, names that cannot be ours, secrets,
payloads, the start, the end and what changed since, and the list of what could not be taken.

What keeps it once is the position. It is any JSON value of yours, such as offsets into
files or counts of points; it is stored in one transaction with the portion that it belongs
to, and given back to `read` the next time. So:

- a portion's position says all that must be known to go on behind it, and nothing of the time
  before is read again;
- a portion is small enough for memory, and for one transaction: `PORTION_POINTS` points;
- what is half there (a record that is being written) is left for the next time;
- `identity` must not change as long as it is the same run, and no other run may have it.

Foreign libraries are imported inside of functions: `quark import --help` needs none. What the
tool has and a run of ours cannot hold goes to `Losses`, never away in silence. Whatever is
wrong with a single run is an `ImportFailure`; the other runs are imported all the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_core.errors import QuarkError
from quark_core.records.base import start_fields

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quark_core.records import StreamRecord

_FARTHEST_S = 1e12
PORTION_POINTS = 50_000
"""About how many points one portion has at most."""

PORTION_FILES = 64
PORTION_BYTES = 64 * 2**20
"""How many files, and how many bytes of them as far as they are counted."""


class ImportFailure(QuarkError):
    """A place or a run that cannot be read; the message says what to do.

    Attributes:
        exit_status: Of a command that was given the place.
    """

    exit_status = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a tool says of a run. What it does not know is None or empty.

    Attributes:
        identity: What tells it from every other run of the tool, wherever that lies, for ever.
        project: Project or experiment.
        name: Its name there.
        notes: Free text.
        tags: Tags.
        config: Configuration: JSON values, numpy scalars and what `start_run` takes besides.
        environment: What else is known, for people: JSON values.
        groups: Paths of the groups that it is in.
        fields: What is noted of it by name: JSON values.
        status: completed, failed or interrupted; "running" where it goes on.
        is_told: Whether the tool says the status; else it is a guess, and no end as long as
            somebody watches.
        started_us, ended_us: Microseconds since the epoch.
        parent: Identity of its parent.
        git_commit: Of its code.
        run_id: Its id with us, where it has one already.
    """

    identity: str
    project: str
    name: str | None = None
    notes: str | None = None
    tags: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    status: str = "completed"
    is_told: bool = True
    started_us: int | None = None
    ended_us: int | None = None
    parent: str | None = None
    git_commit: str | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class Points:
    """Points of metrics as columns of one length, in the order in which they were logged.

    Attributes:
        names: The metrics, as the tool calls them.
        which: Of each point, the place of its metric in `names`.
        steps: Steps; -1 where a point has an epoch alone.
        values: Values; not finite where the data was not.
        times_us: Moments, microseconds since the epoch.
        epochs: Epochs, -1 where there is none; None where no point has one.
    """

    names: Sequence[str]
    which: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    times_us: NDArray[np.int64]
    epochs: NDArray[np.int64] | None = None


def make_integers(values: Sequence[int]) -> NDArray[np.int64]:
    """Whole numbers as a column; what it cannot hold as its least one, which no record has."""
    import numpy as np

    try:
        return np.array(values, np.int64)
    except OverflowError:
        low, high = -(2**63), 2**63 - 1
        return np.array([one if low <= one <= high else low for one in values], np.int64)


class PointList:
    """Collects points one by one, where the tool gives them so.

    Args:
        in_us: Whether times are whole microseconds since the epoch, and not seconds.
    """

    __slots__ = ("_epochs", "_in_us", "_names", "_steps", "_times", "_values", "_which")

    def __init__(self, *, in_us: bool = False) -> None:
        self._in_us = in_us
        self._names: dict[str, int] = {}
        self._which: list[int] = []
        self._steps: list[int] = []
        self._epochs: list[int] = []
        self._values: list[float] = []
        self._times: list[Any] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, step: int, value: float, time: float, epoch: int = -1) -> None:
        """Add one point; without a step, or an epoch, that is -1."""
        names = self._names
        place = names.get(name)
        if place is None:
            place = names[name] = len(names)
        self._which.append(place)
        self._steps.append(step)
        self._epochs.append(epoch)
        self._values.append(value)
        self._times.append(time)

    def take(self) -> Points:
        """The points so far, as columns; the list is empty then."""
        import numpy as np

        if self._in_us:
            times_us = make_integers(self._times)
        else:
            seconds = np.nan_to_num(np.array(self._times, np.float64), posinf=0.0, neginf=0.0)
            # What lies beyond is told as what it is, and must fit into an integer till then.
            seconds = seconds.clip(-_FARTHEST_S, _FARTHEST_S)
            times_us = np.rint(seconds * 1e6).astype(np.int64)
        points = Points(
            list(self._names),
            np.array(self._which, np.int64),
            make_integers(self._steps),
            np.array(self._values, np.float64),
            times_us,
            make_integers(self._epochs) if max(self._epochs, default=-1) >= 0 else None,
        )
        self.__init__(in_us=self._in_us)  # type: ignore[misc]
        return points


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile:
    """Something that becomes an artifact.

    Attributes:
        artifact_type: Such as `image`, `table`, `file`.
        name: Its name, with `/` between parts.
        content: Its bytes, or the file that holds them.
        payload_format: json, text or bytes.
        step, time_us: Where and when it was logged.
        metadata: JSON values.
        aliases: Names of this version, such as `best`.
    """

    artifact_type: str
    name: str
    content: bytes | Path
    payload_format: str = "bytes"
    step: int | None = None
    time_us: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    aliases: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """A piece of a run, stored as a whole or not at all.

    Attributes:
        position: Where the next portion begins: JSON values.
        points: Points of metrics.
        records: Records of other kinds, as `Record.make` or `start_fields` makes them; who
            wrote them is filled in.
        files: What becomes artifacts.
        from_step: The run was taken up again here, from this step on: what it had at this
            step or beyond is hidden, and what follows counts.
    """

    position: Mapping[str, Any]
    points: Points | None = None
    records: Sequence[StreamRecord] = ()
    files: Sequence[ForeignFile] = ()
    from_step: int | None = None


class Gathered:
    """Collects what is to be one portion: points, records and files.

    Attributes:
        points, records, files: What it is made of.
        size_bytes: How large the files are, where whoever adds them counts that.

    Args:
        in_us: As of `PointList`.
        most_files: How many files fill it.
    """

    def __init__(self, *, in_us: bool = False, most_files: int = PORTION_FILES) -> None:
        self._most_files = most_files
        self.points = PointList(in_us=in_us)
        self.records: list[StreamRecord] = []
        self.files: list[ForeignFile] = []
        self.size_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether so much is there that it is to be stored before more is read."""
        is_heavy = len(self.files) >= self._most_files or self.size_bytes >= PORTION_BYTES
        return is_heavy or len(self.points) >= PORTION_POINTS

    def make_portion(self, position: Mapping[str, Any], from_step: int | None = None) -> Portion:
        """What there is by now; nothing is, then."""
        portion = Portion(
            position=position,
            points=self.points.take() if len(self.points) else None,
            records=self.records,
            files=self.files,
            from_step=from_step,
        )
        self.records, self.files, self.size_bytes = [], [], 0
        return portion


def find_place(place: str | Path) -> Path:
    """The place that runs are imported from.

    Raises:
        ImportFailure: There is none.
    """
    root = Path(place).expanduser()
    if not root.exists():
        raise ImportFailure(f"{root} does not exist")
    return root.resolve()


def start_at(time_us: int) -> tuple[None, str, int, int, int, int]:
    """The fields that a record begins with that another tool has written at a time."""
    return (*start_fields(None)[:5], time_us)


KnownPoints = Callable[[str], Counter[tuple[int, int, float]]]
"""Name of a metric -> time in us, step and value of its points that are in our store, counted."""


class ForeignRun(ABC):
    """One run of another tool.

    Attributes:
        key: Tells it from the other runs of the place, also before it can be described.
        known: For a tool that gives points in no order that stays: those that were taken.
            Set before `read` is called.
    """

    key: str
    known: KnownPoints

    @abstractmethod
    def describe(self) -> RunFacts:
        """What is known of it: asked before it is read, and again afterwards.

        Raises:
            ImportFailure: It cannot be read.
        """

    @abstractmethod
    def read(self, position: Mapping[str, Any], losses: Losses) -> Iterator[Portion]:
        """What it holds behind a position, up to now.

        Args:
            position: That of the last portion that was stored; empty at first.
            losses: Told of what cannot be taken.

        Raises:
            ImportFailure: It cannot be read on; what was yielded before is kept.
        """

    def mark(self) -> str | None:
        """A text that stays the same as long as there is nothing new; None where nobody knows."""
        return None


_MOST_NAMES = 200
_OTHERS = "(others)"
_SHOWN = 200
# From here on float64 has not every integer.
_ROUNDED_FROM = 2.0**53


@dataclass(frozen=True, slots=True)
class Loss:
    """What was not taken.

    Attributes:
        kind: What it is: metric, image, table …
        name: Its name at the tool.
        reason: Why.
        count: How many of it.
    """

    kind: str
    name: str
    reason: str
    count: int

    def to_dict(self) -> dict[str, str | int]:
        """A new dict of JSON-like values."""
        return asdict(self)


class Losses:
    """Collects what could not be taken, in bounded memory."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, name: str, reason: str, count: int = 1) -> None:
        """So many things of a kind and a name could not be taken, for a reason."""
        key = (kind, name[:_SHOWN], reason[:_SHOWN])
        if key not in self._counts and len(self._counts) >= _MOST_NAMES:
            key = (kind, _OTHERS, reason[:_SHOWN])
            if key not in self._counts and len(self._counts) >= 2 * _MOST_NAMES:
                key = (_OTHERS, _OTHERS, _OTHERS)
        self._counts[key] += count

    def read_number(self, kind: str, name: str, given: Any) -> float:
        """A number of a tool, or its text, as a float64; what that cannot hold of it is told.

        One beyond it becomes an infinity, and an integer above 2**53 is rounded.

        Raises:
            TypeError, ValueError: It is no number.
        """
        try:
            number = float(given)
        except OverflowError:
            number = math.inf if given > 0 else -math.inf
        if math.isinf(number):
            if isinstance(given, int) or (isinstance(given, str) and "n" not in given.lower()):
                self.add(kind, name, "it exceeds float64 and is stored as infinity")
        elif abs(number) >= _ROUNDED_FROM and _find_integer(given) not in (None, int(number)):
            self.add(kind, name, "an integer above 2**53, which is rounded to float64")
        return number

    def list(self) -> list[Loss]:
        """All of it, in the order in which it was met."""
        return [Loss(*key, count) for key, count in self._counts.items()]


def _find_integer(given: Any) -> int | None:
    """The integer that a number or a text is; None of one with a point or an exponent."""
    if isinstance(given, float):
        return None
    try:
        return int(given)
    except ValueError:
        return None
