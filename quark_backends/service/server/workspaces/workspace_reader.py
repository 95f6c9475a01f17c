"""A workspace as a backend that is read, for what looks at runs beside the service's own routes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from quark_core.errors import ArtifactNotFoundError, BackendUnavailable

if TYPE_CHECKING:
    from quark_backends.service.server.workspaces.payload_vault import PayloadVault
    from quark_backends.service.server.workspaces.stores import WorkspaceStore
    from quark_core.backends.contract import Batch, Generation, Payload


class WorkspaceReader:
    """Reads the store and the payloads of one workspace; every method from any thread.

    It has what `SupportsRead`, `SupportsSeries`, `SupportsChanges`, `SupportsSearch`,
    `SupportsPages`, `SupportsGrid`, `SupportsGenerations`, `SupportsArtifacts` and
    `SupportsCoordination` read with, and refuses to write.

    Args:
        store: The store, which stays open as long as this is used; not closed by it.
        vault: Where payloads are; None where none are asked for.
        workspace: The workspace's name.
    """

    def __init__(self, store: WorkspaceStore, vault: PayloadVault | None, workspace: str) -> None:
        self._vault = vault
        self._workspace = workspace
        self.load_run = store.load_run
        self.list_runs = store.list_runs
        self.read = store.read
        self.iterate = store.iterate
        self.read_series = store.read_series
        self.read_series_many = store.read_series_many
        self.read_heads = store.read_heads
        self.read_changes = store.read_changes
        self.read_mark = store.read_mark
        self.read_grid = store.read_grid
        self.read_outputs = store.read_outputs
        self.search = store.search
        self.search_page = store.search_page
        self.list_names = store.list_names
        self.summarize = store.summarize
        self.list_sweeps = store.list_sweeps
        self.load_sweep = store.load_sweep
        self.list_trials = store.list_trials

    def open_payload(self, run_id: str, sha256: str) -> BinaryIO:
        """See `SupportsArtifacts`."""
        found = None
        if self._vault is not None:
            found = self._vault.open(self._workspace, run_id, sha256)
        if found is None:
            raise ArtifactNotFoundError(f"payload {sha256} of run {run_id} is not kept here")
        return found

    def payload_directory(self, run_id: str) -> Path | None:
        """See `SupportsArtifacts`: there is none to put anything into."""
        del run_id
        return None

    def put_payload(self, payload: Payload) -> None:
        """Refuses."""
        del payload
        _refuse()

    def write(self, batch: Batch) -> None:
        """Refuses."""
        del batch
        _refuse()

    def write_generation(self, generation: Generation) -> int:
        """Refuses."""
        del generation
        _refuse()

    def close(self) -> None:
        """Leaves the store to whoever has opened it."""


def _refuse() -> NoReturn:
    raise BackendUnavailable("the workspace is only looked at")
