"""The source snapshots of runs: read back, and compared file by file."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Literal

from quark_core.artifacts.source_packs import ManifestEntry, SourcePacks, decode_manifest
from quark_core.backends.contract import SupportsArtifacts, SupportsRead
from quark_core.errors import ArtifactDamagedError, ArtifactNotFoundError, SessionStoreError
from quark_core.records.kinds.provenance import SOURCES_KEY, FingerprintRecord
from quark_core.records.names import is_sha256
from quark_core.records.query import Query

CHANGES_KEY = "sources/git.diff"
PACKAGES_KEY = "sources/packages.txt"
GIT_DIFF = "git_diff"
"""Key of the fingerprint, with subject `code`, whose digest is that of the kept diff."""
REDACTED = "a secret in it was replaced"
"""The reason of a file whose text is not quite what ran."""

_MOST_PAYLOAD_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source snapshot.

    Attributes:
        path: Path relative to the project's root, with slashes.
        sha256: SHA-256 of the file at the time of the run.
        size_bytes: Size in bytes at that time.
        data: Stored content, or None.
        reason: Reason why the content is missing or redacted, or None.
    """

    path: str
    sha256: str
    size_bytes: int
    data: bytes | None = None
    reason: str | None = None

    @property
    def text(self) -> str | None:
        """Content as text, or None if it was not stored."""
        return None if self.data is None else _decode_text(self.data)

    @property
    def is_exact(self) -> bool:
        """Whether the stored content is the file, byte by byte."""
        return self.data is not None and self.reason is None


@dataclass(frozen=True, slots=True, eq=False)
class SourceSnapshot(Mapping[str, SourceFile]):
    """Source snapshot of one attempt of a run: a mapping of paths to files.

    Attributes:
        run_id: ID of the run.
        attempt: Number of the attempt.
        digest: Digest over all paths and hashes.
        root: Path of the project's root on the machine of the run.
        main: Main script, relative to the root, or None.
        entry: Kind of start: script, module, notebook, command, stdin …
        files: The files, sorted by path.
        outside: Top-level packages outside the root and outside an environment. Their source is not
            recorded.
        changed: Paths of files that changed during the attempt. The first version is stored.
        left_out: Path or name -> reason why it is not in the snapshot.
    """

    run_id: str
    attempt: int
    digest: str
    root: str
    main: str | None
    entry: str
    files: tuple[SourceFile, ...]
    outside: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    _by_path: dict[str, SourceFile] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_path", {file.path: file for file in self.files})

    def find(self, path: str) -> SourceFile | None:
        """Return the file of a path, or None."""
        return self._by_path.get(path)

    def __getitem__(self, path: str) -> SourceFile:
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)


def digest_sources(files: Iterable[tuple[str, str]]) -> str:
    """One digest over paths and hashes, in whatever order they come."""
    lines = "".join(f"{path}\0{sha256}\n" for path, sha256 in sorted(files))
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


def read_sources(
    reader: SupportsRead, run_id: str, *, attempt: int | None = None, texts: bool = True
) -> SourceSnapshot:
    """What an attempt of a run was made of.

    Args:
        reader: Any backend that reads.
        run_id: The run.
        attempt: Which attempt; the newest one that says anything by default.
        texts: Whether the files' texts are read too; hashes and sizes come without.

    Raises:
        ArtifactNotFoundError: Nothing is known of its sources; the message says why.
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    fingerprint = _find_fingerprint(reader, run_id, attempt)
    packs = SourcePacks(partial(_read_payload, reader, run_id)) if texts else None
    entries = _read_entries(reader, run_id, fingerprint)
    return _describe(run_id, fingerprint, tuple(_read_file(entry, packs) for entry in entries))


def read_source(
    reader: SupportsRead, run_id: str, path: str, *, attempt: int | None = None
) -> SourceFile | None:
    """One file that an attempt of a run was made of, or None; the others are not read.

    Raises:
        ArtifactNotFoundError: Nothing is known of the run's sources; the message says why.
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    entries = _read_entries(reader, run_id, _find_fingerprint(reader, run_id, attempt))
    found = next((entry for entry in entries if entry.path == path), None)
    return (
        None
        if found is None
        else _read_file(found, SourcePacks(partial(_read_payload, reader, run_id)))
    )


def _read_entries(
    reader: SupportsRead, run_id: str, fingerprint: FingerprintRecord
) -> tuple[ManifestEntry, ...]:
    known = dict(fingerprint.metadata or {})
    manifest = known.get("manifest")
    if not isinstance(manifest, str):
        raise ArtifactNotFoundError(
            f"run {run_id} has only one digest of its sources: {known.get('reason', 'no list')}"
        )
    return decode_manifest(_read_payload(reader, run_id, manifest))


def _describe(
    run_id: str, fingerprint: FingerprintRecord, files: tuple[SourceFile, ...]
) -> SourceSnapshot:
    known = dict(fingerprint.metadata or {})
    return SourceSnapshot(
        run_id=run_id,
        attempt=fingerprint.attempt,
        digest=fingerprint.digest,
        root=str(known.get("root", "")),
        main=known["main"] if isinstance(known.get("main"), str) else None,
        entry=str(known.get("entry", "")),
        files=files,
        outside=_list_texts(known.get("outside")),
        changed=_list_texts(known.get("changed")),
        left_out=_read_reasons(known.get("left_out")),
    )


def list_attempts(reader: SupportsRead, run_id: str) -> tuple[int, ...]:
    """The attempts of a run of whose sources anything is known, the oldest first."""
    return tuple(
        sorted({record.attempt for record in _list_fingerprints(reader, run_id, SOURCES_KEY)})
    )


def read_git_changes(
    reader: SupportsRead, run_id: str, *, attempt: int | None = None
) -> str | None:
    """What the tracked files of the git tree differed in from its commit, or None."""
    found = _list_fingerprints(reader, run_id, GIT_DIFF)
    wanted = attempt if attempt is not None else max(list_attempts(reader, run_id), default=0)
    digests = [record.digest for record in found if record.attempt == wanted]
    return _read_text(reader, run_id, digests[-1] if digests else None)


def read_packages(reader: SupportsRead, run_id: str) -> tuple[str, ...]:
    """All that was installed where a run ran, as `name==version`; nothing where it is not known.

    Raises:
        RunNotFoundError: An unknown run.
        SessionStoreError: The store cannot be read.
    """
    stored = reader.load_run(run_id)
    values = {} if stored.environment is None else stored.environment.values
    installed = values.get("installed")
    digest = installed.get("digest") if isinstance(installed, dict) else None
    text = _read_text(reader, run_id, digest)
    return () if text is None else tuple(text.splitlines())


def _list_texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _read_reasons(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): str(reason) for name, reason in value.items()}


def _read_text(reader: SupportsRead, run_id: str, digest: object) -> str | None:
    if not isinstance(digest, str):
        return None
    try:
        return _read_payload(reader, run_id, digest).decode("utf-8", "replace")
    except ArtifactNotFoundError:
        return None


def _list_fingerprints(reader: SupportsRead, run_id: str, key: str) -> list[FingerprintRecord]:
    query = Query(equals={"subject": "code", "key": key}, all_attempts=True)
    found = reader.read(run_id, FingerprintRecord.KIND, query).to_records()
    # A backend may be older than a filter.
    return [
        record
        for record in found
        if isinstance(record, FingerprintRecord) and record.subject == "code" and record.key == key
    ]


def _find_fingerprint(reader: SupportsRead, run_id: str, attempt: int | None) -> FingerprintRecord:
    found = _list_fingerprints(reader, run_id, SOURCES_KEY)
    if attempt is not None:
        found = [record for record in found if record.attempt == attempt]
    if not found:
        which = "" if attempt is None else f" of attempt {attempt}"
        raise ArtifactNotFoundError(
            f"run {run_id} has no source snapshot{which}. An earlier version of Quark logged "
            "it, QUARK_SOURCES=off was set, or it ended too early"
        )
    newest = max(record.attempt for record in found)
    return [record for record in found if record.attempt == newest][-1]


def _read_file(entry: ManifestEntry, packs: SourcePacks | None) -> SourceFile:
    data, reason = None, entry.reason or None
    if packs is not None and entry.pack:
        data, trouble = packs.read(entry)
        reason = trouble or reason
    elif not entry.pack:
        reason = reason or "its text was not stored"
    return SourceFile(entry.path, entry.sha256, entry.size_bytes, data, reason)


def _read_payload(reader: SupportsRead, run_id: str, sha256: str) -> bytes:
    """A payload as a whole, checked.

    Raises:
        ArtifactNotFoundError: It is not there.
        ArtifactDamagedError: It is not what was stored, or too large to be.
    """
    backend: object = reader
    if not is_sha256(sha256) or not isinstance(backend, SupportsArtifacts):
        raise ArtifactNotFoundError(f"run {run_id}: {reader} has no payload {sha256!r:.80}")
    with contextlib.closing(backend.open_payload(run_id, sha256)) as file:
        try:
            data = b"".join(_read_pieces(file, _MOST_PAYLOAD_BYTES))
        except OSError as error:
            raise SessionStoreError(f"payload {sha256} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ArtifactDamagedError(f"payload {sha256} of run {run_id} is not the stored one")
    return data


def _read_pieces(file: BinaryIO, most: int) -> Iterator[bytes]:
    while most > 0 and (piece := file.read(min(most, 1024 * 1024))):
        most -= len(piece)
        yield piece


def _decode_text(data: bytes) -> str:
    """The text of a source, by what its first lines say of its encoding."""
    import tokenize

    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("utf-8", "replace")


_MOST_LINES = 20_000
_CONTEXT_LINES = 3
# How often two lines are held beside one another; a second's worth.
_MOST_LOOKS = 2_000_000
_POPULAR_FROM = 200

Change = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SourceDiff:
    """One file that is not the same on both sides.

    Attributes:
        path: Its path, on the side that has it.
        kind: `added` to the second side, `removed` from the first, `changed`, or `moved`.
        before, after: The file on either side, or None.
        lines: A unified diff without ends of lines; nothing where a text is not kept. Where it
            would take too long to align them, the one text is removed and the other added.
    """

    path: str
    kind: Literal["added", "removed", "changed", "moved"]
    before: SourceFile | None
    after: SourceFile | None
    lines: tuple[str, ...] = ()


def diff_sources(
    before: Mapping[str, SourceFile], after: Mapping[str, SourceFile]
) -> tuple[SourceDiff, ...]:
    """The files that differ, by path; one that has another path and the same content has moved.

    Equality is that of the files as they were: a secret that was replaced makes no difference
    where there is none, and where the files differed in it alone the lines are equal.
    """
    gone = {path: file for path, file in before.items() if path not in after}
    new = {path: file for path, file in after.items() if path not in before}
    moved = {file.sha256: path for path, file in gone.items()}
    out = []
    for path, file in new.items():
        origin = moved.pop(file.sha256, None)
        old = None if origin is None else gone.pop(origin)
        kind: Literal["added", "moved"] = "added" if old is None else "moved"
        out.append(SourceDiff(path, kind, old, file, _diff(old, file)))
    out += [
        SourceDiff(path, "removed", file, None, _diff(file, None)) for path, file in gone.items()
    ]
    for path, file in before.items():
        other = after.get(path)
        if other is not None and other.sha256 != file.sha256:
            out.append(SourceDiff(path, "changed", file, other, _diff(file, other)))
    return tuple(sorted(out, key=lambda diff: diff.path))


def count_equal(before: Mapping[str, SourceFile], after: Mapping[str, SourceFile]) -> int:
    """How many files have the same path and the same content."""
    shared = ((file, after[path]) for path, file in before.items() if path in after)
    return sum(1 for file, other in shared if file.sha256 == other.sha256)


def _diff(before: SourceFile | None, after: SourceFile | None) -> tuple[str, ...]:
    texts = [None if file is None else file.text for file in (before, after)]
    if any(
        file is not None and text is None for file, text in zip((before, after), texts, strict=True)
    ):
        return ()
    old, new = ([] if text is None else text.splitlines() for text in texts)
    if max(len(old), len(new)) > _MOST_LINES:
        return ()
    names = ["/dev/null" if file is None else file.path for file in (before, after)]
    return tuple(_lay_out(old, new, names[0], names[1]))


def _lay_out(old: list[str], new: list[str], old_name: str, new_name: str) -> Iterator[str]:
    """A unified diff, as `difflib.unified_diff` lays it out, in a bounded time."""
    for number, group in enumerate(_group_changes(old, new)):
        if not number:
            yield f"--- {old_name}"
            yield f"+++ {new_name}"
        first, last = group[0], group[-1]
        yield f"@@ -{_tell_range(first[1], last[2])} +{_tell_range(first[3], last[4])} @@"
        for tag, low, high, new_low, new_high in group:
            if tag == "equal":
                yield from (f" {line}" for line in old[low:high])
                continue
            yield from (f"-{line}" for line in old[low:high])
            yield from (f"+{line}" for line in new[new_low:new_high])


def _group_changes(old: list[str], new: list[str]) -> list[list[Change]]:
    try:
        return list(_BoundedMatcher(old, new).get_grouped_opcodes(_CONTEXT_LINES))
    except _TooLongError:
        pass
    head = _count_shared(zip(old, new, strict=False))
    tail = _count_shared(zip(reversed(old[head:]), reversed(new[head:]), strict=False))
    before = (max(0, head - _CONTEXT_LINES), head)
    middle = (head, len(old) - tail, head, len(new) - tail)
    after = min(_CONTEXT_LINES, tail)
    return [
        [
            ("equal", *before, *before),
            ("replace", *middle),
            ("equal", middle[1], middle[1] + after, middle[3], middle[3] + after),
        ]
    ]


def _count_shared(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tell_range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


class _TooLongError(Exception):
    """To align two texts takes longer than anybody waits."""


class _BoundedMatcher(difflib.SequenceMatcher[str]):
    """Gives up on texts that it takes a power of their lengths to align."""

    def __init__(self, old: list[str], new: list[str]) -> None:
        super().__init__(None, old, new)
        self._old = old
        # Lines that are so many are not looked for, as `autojunk` has it.
        most = len(new) // 100 + 1 if len(new) >= _POPULAR_FROM else len(new)
        counted = Counter(new)
        self._counts = {line: count for line, count in counted.items() if count <= most}
        self._left_looks = _MOST_LOOKS

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        self._left_looks -= sum(1 + self._counts.get(line, 0) for line in self._old[alo:ahi])
        if self._left_looks < 0:
            raise _TooLongError
        return super().find_longest_match(alo, ahi, blo, bhi)
