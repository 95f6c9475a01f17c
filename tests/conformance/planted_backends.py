"""A small sound backend, and weak ones that differ from it in one thing each.

Which one is opened is said by the option `weakness`, so that other processes
can open the same one.
"""

import json
import os
import sys
import threading
import time

import xxhash

from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.stored_batches import describe_run, dump_batch, restore_batch, select_rows
from quark_core.errors import (
    BackendRejected,
    BackendUnavailable,
    RunNotFoundError,
    SchemaValidationError,
)

WEAK = {}


class SoundBackend:
    """One JSON line per batch and run, synced."""

    def __init__(self, config):
        self._folder = config.storage_dir / "kept"
        self._known = {}

    def write(self, batch):
        digest = xxhash.xxh3_64_hexdigest(batch.body)
        try:
            known = self._load_digests(batch.run_id).get((batch.writer_id, batch.number))
            if known == digest:
                return
            if known is not None:
                raise BackendRejected("other content under a known number")
            line = json.dumps({**dump_batch(batch), "digest": digest})
            self.append(self._path(batch.run_id), f"{line}\n")
        except SchemaValidationError as error:
            raise BackendRejected(str(error)) from error
        except OSError as error:
            raise BackendUnavailable(f"kept: {error}") from error

    def append(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                text = "\n" + text  # somebody was killed in the middle of a line
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self):
        pass

    def read(self, run_id, kind, query):
        return select_rows(self.load(run_id), kind, query)

    def load_run(self, run_id):
        return describe_run(self.load(run_id))

    def list_runs(self, *, project=None, limit=None):
        runs = [self.load_run(path.stem) for path in self._folder.glob("*.jsonl")]
        runs = [run for run in runs if project in (None, run.project.name)]
        return sorted(runs, key=lambda run: run.run.created_at, reverse=True)[:limit]

    def load(self, run_id):
        batches = [restore_batch(line) for line in read_lines(self._path(run_id))]
        if not batches:
            raise RunNotFoundError(f"no run {run_id}")
        return batches

    def _load_digests(self, run_id):
        lines = read_lines(self._path(run_id))
        return {(line["writer_id"], line["number"]): line["digest"] for line in lines}

    def _path(self, run_id):
        return self._folder / f"{run_id}.jsonl"


def read_lines(path):
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def weakness(backend):
    WEAK[backend.__name__] = backend
    return backend


def map_records(line, change):
    """A dumped line with every record changed; those that become None left out."""
    data = json.loads(line)
    data["records"] = [r for r in map(change, data["records"]) if r is not None]
    return json.dumps(data) + "\n"


class ChangesLines(SoundBackend):
    def append(self, path, text):
        super().append(path, map_records(text, self.change))

    def change(self, record):
        return record


@weakness
class LosesTheLastBatchOnClose(SoundBackend):
    """Each batch is written when the next one comes."""

    held = None

    def append(self, path, text):
        if self.held is not None:
            super().append(*self.held)
        self.held = path, text


@weakness
class AcknowledgesBeforeWriting(SoundBackend):
    """A thread writes, a moment later."""

    def append(self, path, text):
        def later():
            time.sleep(20)
            SoundBackend.append(self, path, text)

        threading.Thread(target=later, daemon=True).start()


@weakness
class WritesOnClose(SoundBackend):
    """Everything is written at the end."""

    def __init__(self, config):
        super().__init__(config)
        self.held = []

    def append(self, path, text):
        self.held.append((path, text))

    def close(self):
        for path, text in self.held:
            super().append(path, text)
        self.held = []


@weakness
class StoresTwice(SoundBackend):
    """It declares that it does not."""

    def _load_digests(self, run_id):
        return {}

    def load(self, run_id):
        batches = super().load(run_id)
        return [b for b in batches if b.kind != "metric"] + batches


@weakness
class ForgetsWhatItHadWhenItIsOpened(SoundBackend):
    """Duplicates are known within one opening only."""

    def _load_digests(self, run_id):
        return self._known

    def append(self, path, text):
        super().append(path, text)
        line = json.loads(text)
        self._known[line["writer_id"], line["number"]] = line["digest"]


@weakness
class TellsDuplicatesByContent(SoundBackend):
    def append(self, path, text):
        def values(line):
            return [(r.get("value"), r.get("step")) for r in line["records"]]

        mine = json.loads(text)
        for line in read_lines(path):
            if line["kind"] == mine["kind"] == "metric" and values(line) == values(mine):
                return
        super().append(path, text)


@weakness
class TakesOtherContentUnderAKnownNumber(SoundBackend):
    def write(self, batch):
        if (batch.writer_id, batch.number) not in self._load_digests(batch.run_id):
            super().write(batch)


@weakness
class SwallowsErrors(SoundBackend):
    def write(self, batch):
        try:
            super().write(batch)
        except Exception:
            return


@weakness
class CallsEveryErrorARefusal(SoundBackend):
    def write(self, batch):
        try:
            super().write(batch)
        except BackendUnavailable as error:
            raise BackendRejected(str(error)) from error


@weakness
class LetsItsErrorsOut(SoundBackend):
    """The file's own errors, which say nothing of what is to be done."""

    def write(self, batch):
        try:
            super().write(batch)
        except BackendUnavailable as error:
            raise error.__cause__ from None


@weakness
class ReordersRecords(ChangesLines):
    def append(self, path, text):
        data = json.loads(text)
        data["records"].reverse()
        SoundBackend.append(self, path, json.dumps(data) + "\n")


@weakness
class MergesBySteps(SoundBackend):
    """The last value of a step wins."""

    def append(self, path, text):
        data = json.loads(text)
        if data["kind"] == "metric":
            latest = {(r["metric_key"], r["step"]): r for r in data["records"]}
            data["records"] = list(latest.values())
        super().append(path, json.dumps(data) + "\n")


@weakness
class RoundsFloats(ChangesLines):
    def change(self, record):
        if isinstance(record.get("value"), float):
            record["value"] = float(f"{record['value']:.6g}")
        return record


@weakness
class DropsNan(ChangesLines):
    def change(self, record):
        return None if record.get("value") != record.get("value") else record


@weakness
class KeepsStepsAsFloats(ChangesLines):
    def change(self, record):
        if record.get("step") is not None:
            record["step"] = int(float(record["step"]))
        return record


@weakness
class FoldsTheCaseOfNames(ChangesLines):
    def change(self, record):
        if "metric_key" in record:
            record["metric_key"] = record["metric_key"].lower()
            record["metric_name"] = record["metric_name"].lower()
        return record


@weakness
class CutsLongTexts(ChangesLines):
    def change(self, record):
        if record.get("description"):
            record["description"] = record["description"][:500]
        return record


@weakness
class DropsMetadata(ChangesLines):
    def change(self, record):
        if "metadata" in record:
            record["metadata"] = None
        return record


@weakness
class MixesRuns(SoundBackend):
    def _path(self, run_id):
        return self._folder / "run0.jsonl"


@weakness
class StumblesOverKinds(SoundBackend):
    """It knows metrics and lifecycle, and breaks on anything else."""

    def write(self, batch):
        {"metric": 1, "lifecycle": 2}[batch.kind]
        super().write(batch)


@weakness
class KnowsOneWriterOnly(SoundBackend):
    """Numbers are taken for the run's, not for the writer's."""

    def write(self, batch):
        if batch.kind == "metric":
            numbers = {number for _, number in self._load_digests(batch.run_id)}
            if batch.number in numbers:
                return
        super().write(batch)


@weakness
class RefusesGaps(SoundBackend):
    def write(self, batch):
        known = [n for w, n in self._load_digests(batch.run_id) if w == batch.writer_id]
        if batch.number > max(known, default=-1) + 1:
            raise BackendUnavailable(f"batch {batch.number} came too early")
        super().write(batch)


@weakness
class IsNotSafeFromAKill(SoundBackend):
    """In the process that the kit kills, what it wrote lies in a buffer."""

    file = None

    def append(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.file is None or self.file.name != str(path):
            self.file = path.open("a", buffering=1 << 20)
        self.file.write(text)
        if not sys.argv[0].endswith("process_conformance.py"):
            self.file.flush()

    def close(self):
        if self.file is not None:
            self.file.close()
            self.file = None


@weakness
class RewritesTheFile(SoundBackend):
    """What another process wrote meanwhile is written over."""

    def __init__(self, config):
        super().__init__(config)
        path = self._path(config.run_id or "run0")
        self.text = path.read_text() if path.exists() else ""

    def append(self, path, text):
        self.text += text
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(self.text)
        os.replace(scratch, path)


@weakness
class HangsInClose(SoundBackend):
    def close(self):
        threading.Event().wait()


@weakness
class LeavesAThread(SoundBackend):
    """Which keeps the process from ending."""

    started = None

    def append(self, path, text):
        super().append(path, text)
        if self.started is None:
            self.started = threading.Thread(target=time.sleep, args=(3,))
            self.started.start()


@weakness
class ExitsInWrite(SoundBackend):
    def write(self, batch):
        sys.exit(3)


@weakness
class ReadsWhatIsUnknownAsEmpty(SoundBackend):
    def read(self, run_id, kind, query):
        lines = read_lines(self._path(run_id))
        return select_rows([restore_batch(line) for line in lines], kind, query)


@weakness
class IgnoresFilters(SoundBackend):
    def read(self, run_id, kind, query):
        return super().read(run_id, kind, type(query)())


@weakness
class DeclaresWhatItHasNot(SoundBackend):
    """`series` is declared, and there is no read_series."""


@weakness
class HasWhatItDoesNotDeclare(SoundBackend):
    def read_batches(self, run_id, writer_id, start, limit):
        return []


@weakness
class SpeaksAnOlderVersion(SoundBackend):
    """Of the contract."""


def open_planted(config):
    return WEAK.get(config.options.get("weakness"), SoundBackend)(config)


def define(name):
    capabilities = {Capability.READ, Capability.IDEMPOTENT}
    if name == "DeclaresWhatItHasNot":
        capabilities.add(Capability.SERIES)
    return BackendDefinition(
        name="planted",
        summary="a backend with a planted weakness",
        open=open_planted,
        capabilities=frozenset(capabilities),
        api_version=0 if name == "SpeaksAnOlderVersion" else 1,
    )
