"""Projects and runs: identity, state, environment, groups, digests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import msgspec
import xxhash

from quark_core.formatting import format_span
from quark_core.records.base import FieldRules, Record, parse_time
from quark_core.records.json_object import JsonObject, flatten_json

RunStatus = Literal["running", "completed", "failed", "interrupted"]
"""The states that a run records of itself."""
EndCause = Literal[
    "exception", "exit_status", "signal", "preempted", "out_of_memory", "stop_request", "vanished"
]
_MOST_CHARACTERS = 400
_EXIT_OF_ZERO = ("exit_status", "exit status 0")


class ProjectRecord(Record, frozen=True, gc=False):
    """Project: a name and the storage folder of its runs.

    Attributes:
        id: ID, derived from the name.
        name: Name.
        root_path: Storage folder of the runs.
        created_at, updated_at: Times as ISO 8601 text in UTC.
    """

    id: str
    name: str
    root_path: str
    created_at: str
    updated_at: str

    @staticmethod
    def derive_id(name: str) -> str:
        """Return the ID of a project, which is the same in each process."""
        return f"p{xxhash.xxh3_64_hexdigest(name.encode('utf-8', 'replace'))}"


class RunRecord(Record, frozen=True, gc=False):
    """Stored state of a run; times are ISO 8601 text in UTC.

    Attributes:
        id: ID. None only on a rank that cannot know the ID of rank 0.
        project_id, project_name: Project of the run.
        status: `running`, `completed`, `failed` or `interrupted`. Readers derive the state "lost"
            for a running run whose process died.
        parent_run_id: ID of the run that this run descends from, or None.
        lineage_root_run_id: ID of the first run of the lineage. A run without a parent is its own
            root.
        resume_count: Number of times the run was resumed.
        run_path: Directory of the run, or its URI in a remote store.
        git_commit: Git commit of the code, or None.
        strict_mode: Whether the run is strict.
        tags: Tags, sorted and unique.
        attempt: Number of the newest attempt, equal to `resume_count`.
        name, notes: Display name and free text, or None.
        created_at, updated_at, ended_at: Times. `ended_at` is None for a running run.
        archived_at: Time at which the run was archived, or None. Searches omit archived runs.
        groups: Paths of its groups, such as `paper/fig3`, sorted.
        fork_step: Last step that the run shares with its parent, or None if it is not a fork.
    """

    id: str | None
    project_id: str
    project_name: str
    status: str
    parent_run_id: str | None
    lineage_root_run_id: str | None
    resume_count: int
    run_path: str
    git_commit: str | None
    strict_mode: bool
    tags: tuple[str, ...]
    attempt: int
    name: str | None
    notes: str | None
    created_at: str
    updated_at: str
    ended_at: str | None
    archived_at: str | None = None
    groups: tuple[str, ...] = ()
    fork_step: int | None = None

    RULES: ClassVar[FieldRules] = FieldRules(words={"status": get_args(RunStatus)})


class RunEnding(Record, frozen=True, gc=False):
    """Why the newest attempt of a run ended before its program was through.

    Attributes:
        cause: The kind of cause: an exception, an exit status other than 0, a signal, a
            preemption, a lack of memory, a stop request, or a process that vanished.
        message: The cause in one line without secrets, such as
            `ZeroDivisionError: division by zero`, `SIGTERM` or `exit status 3`.
    """

    cause: str
    message: str

    RULES: ClassVar[FieldRules] = FieldRules(words={"cause": get_args(EndCause)})

    def describe(self) -> str:
        """The message on one line of bounded length, without the dot at its end."""
        line = " ".join(self.message.split()).rstrip(".")
        return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"

    @property
    def was_asked_for(self) -> bool:
        """Whether somebody ended the run on purpose: by Ctrl-C, `quark stop` or `sys.exit(0)`."""
        if self.cause == "signal":
            return self.message.startswith("SIGINT")
        return self.cause == "stop_request" or (self.cause, self.message) == _EXIT_OF_ZERO

    @classmethod
    def from_data(cls, data: object) -> RunEnding | None:
        """The ending that `to_dict` gave; None for anything else, such as an older record's."""
        if not isinstance(data, Mapping):
            return None
        cause, message = data.get("cause"), data.get("message")
        if not isinstance(message, str) or not isinstance(cause, str):
            return None
        return cls(cause, message) if cause in get_args(EndCause) else None


class StopRequest(Record, frozen=True, gc=False):
    """Request to stop the newest attempt of a run; times are ISO 8601 text in UTC.

    Attributes:
        id: ID of the request.
        by: Author, as `user@host`.
        at: Time of the request.
        reason: Reason, or None.
        seen_at: Time at which the training process received it, or None.
    """

    id: str
    by: str
    at: str
    reason: str | None = None
    seen_at: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the author is known; the receipt may arrive before the request."""
        return bool(self.by)

    def describe(self) -> str:
        """Return the request as one sentence."""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.by} asked the run to stop at {self.at[:19].replace('T', ' ')} UTC{why}"


class RunDigests(Record, frozen=True, gc=False):
    """What a run was made of, each in one text that is equal where it was the same.

    Attributes:
        config: Of the configuration without its seeds: runs of one digest are seeds of one.
        structure: Of the keys and types of the configuration, whatever their values.
        code: Of all sources of the project that the process had, or None where none are known.
        environment: Of interpreter, libraries and switches, or None.
    """

    config: str | None = None
    structure: str | None = None
    code: str | None = None
    environment: str | None = None


class RunProgress(Record, frozen=True, gc=False):
    """How far a run had come when it said so last.

    Attributes:
        done, total: What is done, and all of it, in the loop's own count; total None where
            nobody knows.
        rate_per_s: How many a second, of late.
        remaining_s: How long it will take still, in seconds, or None.
        at: When, ISO 8601 in UTC.
    """

    done: float
    total: float | None = None
    rate_per_s: float | None = None
    remaining_s: float | None = None
    at: str = ""

    def describe(self, now_us: int | None = None) -> str:
        """A few words: `41 %, 12 min left`.

        Args:
            now_us: The moment, from which on the remaining time is told; that of `at` by
                default.
        """
        if self.total:
            words = [f"{math.floor(100 * min(1.0, self.done / self.total))} %"]
        else:
            words = [f"{self.done:,.0f} steps"]
        if self.remaining_s is not None and math.isfinite(self.remaining_s):
            if self.remaining_s > 0:
                words.append(f"{format_span(self._find_rest_s(now_us))} left")
        elif self.rate_per_s:
            words.append(_tell_rate(self.rate_per_s))
        return ", ".join(words)

    def _find_rest_s(self, now_us: int | None) -> float:
        rest_s = self.remaining_s or 0.0
        if now_us is None or not self.at:
            return rest_s
        try:
            passed_s = (now_us - parse_time(self.at)) / 1e6
        except (ValueError, OverflowError):
            return rest_s
        # A beat that is late, or clocks apart: it is not over before it says so.
        return max(1.0, rest_s - min(max(0.0, passed_s), _BEAT_S))


# What is told comes with each heartbeat, every 10 s; beyond two of them nothing is known.
_BEAT_S = 20.0


def _tell_rate(rate_per_s: float) -> str:
    if rate_per_s >= 1:
        return f"{rate_per_s:,.1f}/s"
    return f"{1 / rate_per_s:,.1f} s a step"


class SettingOrigin(Record, frozen=True, gc=False):
    """One time that a setting of a configuration was given a value: by whom, where, and which.

    Attributes:
        key: The setting, keys of nested mappings joined by dots.
        source: What gave it: a layer, a file, `command line`, `argparse default`.
        place: Where that stands: `train.py:7`, `--lr`; None where nobody knows.
        value: The value, redacted; what is long is cut.
    """

    key: str
    source: str
    place: str | None = None
    value: Any = None

    @property
    def label(self) -> str:
        """Source and place in a few words: `high_lr (train.py:7)`."""
        return self.source if self.place is None else f"{self.source} ({self.place})"


class ConfigSnapshot(Record, frozen=True, gc=False):
    """A run's configuration as plain JSON values, redacted.

    Attributes:
        values: The configuration, interpolations of OmegaConf resolved.
        notes: One line for each value that was replaced, with its path and why.
        raw: The configuration with its interpolations as they were written;
            None where that is the same as `values`.
        origins: Where its settings have their values from, as far as that is known: of each
            setting the newest first, then what that replaced.
    """

    values: JsonObject
    notes: tuple[str, ...] = ()
    raw: JsonObject | None = None
    origins: tuple[SettingOrigin, ...] = ()

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ConfigSnapshot:
        """The snapshot that the data of a lifecycle record of the action `config` holds.

        Origins that are none are let go: the configuration is worth more than where it is from.
        """
        raw = data.get("raw")
        return cls(
            JsonObject(data["values"]),
            tuple(data["notes"]),
            None if raw is None else JsonObject(raw),
            _read_origins(data.get("origins")),
        )

    def to_data(self) -> dict[str, Any]:
        """The data of a lifecycle record of the action `config`."""
        data: dict[str, Any] = {"values": self.values, "notes": list(self.notes)}
        if self.raw is not None:
            data["raw"] = self.raw
        if self.origins:
            data["origins"] = [origin.to_dict() for origin in self.origins]
        return data

    def group_origins(self) -> dict[str, tuple[SettingOrigin, ...]]:
        """Setting -> its origins, the newest first, of the settings of which any are known."""
        found: dict[str, list[SettingOrigin]] = {}
        for origin in self.origins:
            found.setdefault(origin.key, []).append(origin)
        return {key: tuple(each) for key, each in found.items()}


_MOST_ORIGINS = 20_000


def _read_origins(given: object) -> tuple[SettingOrigin, ...]:
    if not isinstance(given, (list, tuple)):
        return ()
    found: list[SettingOrigin] = []
    for each in given[:_MOST_ORIGINS]:
        if not isinstance(each, Mapping):
            continue
        key, source, place = each.get("key"), each.get("source"), each.get("place")
        if isinstance(key, str) and isinstance(source, str) and isinstance(place, str | None):
            found.append(SettingOrigin(key, source, place, each.get("value")))
    return tuple(found)


class EnvironmentSnapshot(Record, frozen=True, gc=False):
    """Where a run ran: interpreter, packages, host, GPUs, command line, git state."""

    values: JsonObject

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> EnvironmentSnapshot:
        """The snapshot that the data of a lifecycle record of the action `environment` holds.

        Parts that are none are let go: everything else is worth more than they are.
        """
        odd = list_odd_parts(data)
        return cls(JsonObject({name: value for name, value in data.items() if name not in odd}))


_ENVIRONMENT_PARTS: dict[str, Any] = {
    **dict.fromkeys(
        ("cpu", "git", "host", "installed", "launch", "process", "python", "variables"),
        dict[str, Any] | None,
    ),
    "gpus": list[Any] | None,
    "imported": list[Any] | None,
    "packages": dict[str, str | None] | None,
}


def list_odd_parts(environment: Mapping[str, Any]) -> list[str]:
    """Parts of an environment that are not what every reader takes them for."""
    odd = []
    for name, form in _ENVIRONMENT_PARTS.items():
        try:
            msgspec.convert(environment.get(name), form)
        except msgspec.ValidationError:
            odd.append(name)
    return odd


class RunContext(Record, frozen=True, gc=False):
    """Identity, state and storage of a run; picklable, without secrets.

    Pass it to other processes. A writer made from it joins the run's open session in this process,
    or else opens its own stream to the same backends.

    Attributes:
        storage_dir: Folder of the `.quark` store.
        store_root: Root of the store; a URI for a remote primary store.
        db_path: Database file of a local store, else None.
        project: The project.
        run: The run, as last known to this process.
        backends: Specifications of all backends, primary first.
        ranks: Value of `ranks` or QUARK_RANKS, or None.
        read_only: Whether the run was opened for reading.
    """

    storage_dir: Path
    store_root: Path | str
    db_path: Path | None
    project: ProjectRecord
    run: RunRecord
    backends: tuple[str, ...] = ()
    read_only: bool = False
    ranks: str | None = None

    @property
    def run_id(self) -> str | None:
        """ID of the run. None only on a rank that cannot know it."""
        return self.run.id

    @property
    def run_path(self) -> Path | str:
        """Directory of the run, or its URI in a remote store."""
        return self.run.run_path if "://" in self.run.run_path else Path(self.run.run_path)

    @property
    def project_id(self) -> str:
        """ID of the project."""
        return self.project.id

    @property
    def project_name(self) -> str:
        """Name of the project."""
        return self.project.name

    @property
    def status(self) -> str:
        """Status of the run, as last known to this process."""
        return self.run.status

    def describe(self) -> str:
        """Return ID, name, project and status as a short text."""
        run = self.run
        name = f" {run.name!r}" if run.name else ""
        return f"{run.id}{name}, project {self.project.name!r}, {run.status}"

    def __repr__(self) -> str:
        return f"RunContext({self.describe()})"

    def to_dict(self) -> dict[str, Any]:
        """Return the context, including project and run, as JSON values."""
        # Written out: zero-argument super() does not work in every Struct subclass.
        return Record.to_dict(self)


# What lifecycle records say of a run's groups, fields and progress, applied to what is known.
#
# Every store and reader applies them by these functions. What a record says wrongly is let go:
# it may come from anybody, and costs no other record of its batch.


def change_groups(known: Iterable[str], data: Mapping[str, Any]) -> list[str]:
    """The groups of a run after a record `group`, sorted.

    Args:
        known: Those before.
        data: Of the record: paths to `add` and to `remove`.
    """
    return sorted({*known, *_texts(data.get("add"))} - {*_texts(data.get("remove"))})


def change_fields(known: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run after a record `fields`, by name.

    Args:
        known: Those before.
        data: Of the record: what to `set`, by name, and names to `remove`.
    """
    found = data.get("set")
    changed = {**known, **(found if isinstance(found, Mapping) else {})}
    for name in _texts(data.get("remove")):
        changed.pop(name, None)
    return dict(sorted(changed.items()))


def read_progress(data: Mapping[str, Any]) -> RunProgress | None:
    """How far the run has come by what a heartbeat says; None where it says nothing of it."""
    told = data.get("progress")
    if told is None:
        return None
    try:
        return msgspec.convert(told, RunProgress)
    except msgspec.ValidationError:
        return None


def _texts(value: object) -> list[str]:
    found = value if isinstance(value, list | tuple) else ()
    return [text for text in found if isinstance(text, str)]


# Digests of what a run was made of: equal where that was equal, in any process and Python.
#
# They are taken of values as records keep them, in an encoding of their own that depends on no
# library: `1` and `1.0` are one number, `-0.0` is `0`, every NaN is the same, a truth value is no
# number, and the order of keys says nothing. Lists are ordered.

_DIGEST_BYTES = 16
# No setting that anybody reads is a list of lists of lists of lists of lists.
_MOST_LISTS = 5
# Most paths have none of these in them, and need no further look.
_SEED_WORDS = ("seed", "rng", "random")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEED = re.compile(
    r"(^|[._/-])("
    r"((py(thon)?)?hash|rand(om)?|manual|global|rng)?seed([_-]?(everything|value|num(ber)?))?"
    r"|random[_-]?state|p?rng([_-](key|state))?"
    # Each library's own, where a run has one of each: `seed.torch`, `seeds.numpy`.
    r"|seeds?\.[^.]+"
    r")$"
)
# What a run is judged by is no setting of it.
_OBJECTIVE = frozenset({"quark_objective", "quark_objective_mode"})
# Of the repr of an object that JSON cannot hold.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Where a process ran and which one it was; what it was made of is all else.
_PLACES = frozenset(
    """
    git process imported installed host.name host.release python.executable launch.rank
    launch.local_rank launch.source variables.CUDA_VISIBLE_DEVICES variables.MASTER_PORT
    variables.RANK variables.LOCAL_RANK variables.NODE_RANK variables.CONDA_DEFAULT_ENV
    variables.WORLD_SIZE variables.SLURM_JOB_ID variables.SLURM_JOB_NAME variables.SLURM_PROCID
    variables.SLURM_NTASKS variables.SLURM_JOB_NUM_NODES variables.SLURM_RESTART_COUNT
    """.split()
)


def is_seed(path: str) -> bool:
    """Whether a setting is a seed, by its name: that of a key, an argument or a variable.

    This alone decides of it: digests, groups, comparisons and `quark why` all ask here. It is
    `seed` or what ends in it (`data.seed`, `random-seed`, `randomSeed`, `PYTHONHASHSEED`), its
    value under another usual name (`seed_everything`, `random_state`, `rng`, `prng_key`), or one
    of several seeds (`seed.torch`).
    """
    lowered = path.lower()
    if not any(word in lowered for word in _SEED_WORDS):
        return False
    return _SEED.search(_HUMP.sub("_", path).lower()) is not None


def digest_config(values: Mapping[str, Any]) -> str:
    """Digest of a configuration without its seeds: runs of one digest are seeds of one.

    The objective is left out too, and where in memory an object lay that is kept as its repr.

    Args:
        values: The configuration; nested keys and keys joined by dots are the same.
    """
    kept = {path: _without_addresses(value) for path, value in _list_settings(values)}
    return _digest(b"config", _encode(kept))


def digest_structure(values: Mapping[str, Any]) -> str:
    """Digest of the keys and types of a configuration, whatever its values.

    Integers and floats are one type; truth values, texts and None are each another. A list is
    of the types of its items, however many of each; an empty one is of none.

    Args:
        values: The configuration, of which seeds and objective are left out: what has equal
            settings has an equal structure.
    """
    types = sorted((_encode(path), _encode_type(value)) for path, value in _list_settings(values))
    return _digest(b"structure", _frame(b"m", b"".join(map(b"".join, types))))


def digest_environment(values: Mapping[str, Any]) -> str:
    """Digest of interpreter, libraries, hardware and switches.

    Args:
        values: As `EnvironmentSnapshot` has them. Which process of which host it was is left
            out, and the state of git, which is the code's; of packages those that were not
            imported, where that is known; and seeds, such as PYTHONHASHSEED.
    """
    imported = list_imported(values)
    kept = {
        path: value
        for path, value in flatten_json(values)
        if not (_is_place(path) or is_seed(path) or is_idle_package(path, imported))
    }
    return _digest(b"environment", _encode(kept))


def list_imported(environment: Mapping[str, Any]) -> frozenset[str] | None:
    """Packages that an environment says were imported; None where it does not say."""
    imported = environment.get("imported")
    if not isinstance(imported, list | tuple):
        return None
    return frozenset(each for each in imported if isinstance(each, str))


def is_idle_package(path: str, imported: frozenset[str] | None) -> bool:
    """Whether a path of an environment is of a package that nobody is known to have imported.

    Args:
        path: The path, as `flatten_json` has it.
        imported: As `list_imported` has it of the same environment.
    """
    section, _, name = path.partition(".")
    return section == "packages" and imported is not None and name not in imported


def make_digests(
    config: Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None,
    code: str | None = None,
) -> RunDigests:
    """The digests of a run; None for what nothing was recorded of.

    Args:
        config: Values of its configuration; an empty one was never given.
        environment: Values of its environment.
        code: Digest of its sources.
    """
    return RunDigests(
        config=digest_config(config) if config else None,
        structure=digest_structure(config) if config else None,
        code=code,
        environment=digest_environment(environment) if environment else None,
    )


def _list_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in flatten_json(values):
        if path not in _OBJECTIVE and not is_seed(path):
            yield path, value


def _without_addresses(value: Any) -> Any:
    if isinstance(value, str):
        return _ADDRESS.sub("", value)
    if isinstance(value, list | tuple):
        return [_without_addresses(item) for item in value]
    return value


def _is_place(path: str) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:end]) in _PLACES for end in range(1, len(parts) + 1))


def _encode_type(value: Any, lists: int = 0) -> bytes:
    """The encoded type of a value; of lists within so many others that they are lists.

    A list's names each type twice, so that each list around it doubles its length.
    """
    if value is None:
        return _encode("null")
    if isinstance(value, bool):
        return _encode("bool")
    if isinstance(value, int | float):
        return _encode("number")
    if isinstance(value, str):
        return _encode("text")
    if isinstance(value, Mapping):
        items = sorted((_encode(str(key)), _encode_type(of, lists)) for key, of in value.items())
        return _frame(b"m", b"".join(map(b"".join, items)))
    if not isinstance(value, Sequence):
        return _encode(type(value).__name__)
    if lists == _MOST_LISTS:
        return _encode("list")
    types = sorted({_encode_type(item, lists + 1) for item in value})
    return _frame(b"l", b"".join(_frame(b"l", _frame(b"b", each) + each) for each in types))


def _encode(value: Any) -> bytes:
    """Bytes that are equal for equal values: each with its type and length before it."""
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int | float):
        return _frame(b"d", _spell(value).encode())
    if isinstance(value, str):
        return _frame(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _frame(b"b", value)
    if isinstance(value, Mapping):
        items = sorted((_encode(str(key)), _encode(item)) for key, item in value.items())
        return _frame(b"m", b"".join(key + item for key, item in items))
    if isinstance(value, Sequence):
        return _frame(b"l", b"".join(map(_encode, value)))
    return _frame(b"o", str(value).encode("utf-8", "surrogatepass"))


def _spell(number: float) -> str:
    """A number as text, the same for an integer and the float that equals it."""
    if number != number:
        return "nan"
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return f"{number:x}" if isinstance(number, int) else float(number).hex()


def _frame(kind: bytes, content: bytes) -> bytes:
    return b"%s%d:%s" % (kind, len(content), content)


def _digest(what: bytes, encoded: bytes) -> str:
    return blake2b(encoded, digest_size=_DIGEST_BYTES, person=what).hexdigest()
