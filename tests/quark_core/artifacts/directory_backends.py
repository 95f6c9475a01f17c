"""Third-party backends that take artifacts: a mirror, and a primary that is not on this disk."""

import os
import threading
from pathlib import Path

from quark_backends.embedded.backend import EmbeddedBackend
from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.registry import default_registry
from quark_core.errors import ArtifactNotFoundError, BackendRejected, BackendUnavailable

FAULTS = {
    "unavailable": lambda: BackendUnavailable("planted outage"),
    "rejected": lambda: BackendRejected("planted refusal"),
    "bug": lambda: ZeroDivisionError("planted bug"),
}


class KeepsInDirectory:
    """Payloads as files of a directory, with a log of what came in which order.

    Attributes:
        fault: What `put_payload` raises: a key of FAULTS, or None.
        refused: Hashes that are refused for good.
        log: ("payload", hash) and ("record", artifact key), as they came.
    """

    def prepare(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.fault = None
        self.refused = set()
        self.log = []
        self.asked = threading.Event()

    def put_payload(self, payload):
        self.asked.set()
        if self.fault is not None:
            raise FAULTS[self.fault]()
        if payload.sha256 in self.refused:
            raise FAULTS["rejected"]()
        data = payload.path.read_bytes()
        assert len(data) == payload.size_bytes
        scratch = self.root / f"{payload.sha256}.{os.getpid()}"
        scratch.write_bytes(data)
        scratch.rename(self.root / payload.sha256)
        self.log.append(("payload", payload.sha256))

    def open_payload(self, run_id, sha256):
        try:
            return (self.root / sha256).open("rb")
        except FileNotFoundError:
            raise ArtifactNotFoundError(f"no payload {sha256}") from None

    def payload_directory(self, run_id):
        return None

    def note(self, batch):
        if batch.kind == "artifact":
            self.log += [("record", record) for record in batch.to_records()]

    @property
    def payloads(self):
        """Hash -> bytes of what is kept."""
        return {path.name: path.read_bytes() for path in self.root.iterdir()}

    @property
    def records(self):
        return [item for what, item in self.log if what == "record"]

    def assert_payloads_came_first(self):
        """No record was there before the payload that it names."""
        came = set()
        for what, item in self.log:
            if what == "payload":
                came.add(item)
            else:
                assert item.payload_relative_path is None or item.sha256 in came


class DirectoryMirror(KeepsInDirectory):
    """A mirror that keeps batches in memory and payloads in a directory."""

    def __init__(self, root):
        self.prepare(root)
        self.batches = []

    def write(self, batch):
        if (batch.writer_id, batch.number) not in {(b.writer_id, b.number) for b in self.batches}:
            self.batches.append(batch)
            self.note(batch)

    def close(self):
        pass


class RemoteRecords:
    """A primary that keeps records and nothing else."""

    def __init__(self, config):
        self._store = EmbeddedBackend(config)

    def write(self, batch):
        self.write_group([batch])

    def write_group(self, batches):
        self._store.write_group(batches)

    def close(self):
        self._store.close()

    def locate(self, run_id):
        return self._store.locate(run_id)

    def read(self, run_id, kind, query):
        return self._store.read(run_id, kind, query)

    def load_run(self, run_id):
        return self._store.load_run(run_id)

    def list_runs(self, *, project=None, limit=None):
        return self._store.list_runs(project=project, limit=limit)

    def write_generation(self, generation):
        return self._store.write_generation(generation)

    def read_outputs(self, run_id, kind, analyzer=None):
        return self._store.read_outputs(run_id, kind, analyzer)


class RemotePrimary(KeepsInDirectory, RemoteRecords):
    """A primary whose payloads have to be sent."""

    def __init__(self, config, root):
        RemoteRecords.__init__(self, config)
        self.prepare(root)

    def write_group(self, batches):
        super().write_group(batches)
        for batch in batches:
            self.note(batch)


def define_mirror(mirror, name="mirror", *, idempotent=True):
    capabilities = {Capability.ARTIFACTS} | ({Capability.IDEMPOTENT} if idempotent else set())
    return BackendDefinition(
        name=name,
        summary="keeps payloads in a directory",
        open=lambda config: mirror,
        capabilities=frozenset(capabilities),
        own_process=False,
    )


def define_remote(opened, root, *, takes_artifacts=True):
    """A definition; each backend that it opens for writing is put into a list."""

    def open_it(config):
        backend = RemotePrimary(config, root) if takes_artifacts else RemoteRecords(config)
        if not config.read_only:
            opened.append(backend)
        return backend

    capabilities = {
        Capability.PRIMARY,
        Capability.READ,
        Capability.IDEMPOTENT,
        Capability.GROUPS,
        Capability.GENERATIONS,
    }
    if takes_artifacts:
        capabilities.add(Capability.ARTIFACTS)
    return BackendDefinition(
        name="remote",
        summary="a primary elsewhere",
        open=open_it,
        capabilities=frozenset(capabilities),
        own_process=False,
    )


def register(definition):
    """Make a backend known to this process, for good; for scripts."""
    default_registry()._definitions[definition.name] = definition
