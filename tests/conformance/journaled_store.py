"""The embedded store on a network file system, where the journal is the store.

There a run's stream journals each batch, once, before the backend is given it.
The kit gives batches to the backend itself, so this one stands for the stream.
"""

import dataclasses

from quark_backends.embedded.journal_backend import JournalBackend
from quark_backends.embedded.plugin import quark_register_backends
from quark_core.backends.contract import Capability
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, Manifest, journal_directory
from quark_core.delivery.segments import Origin
from quark_core.system.process import current_process


class JournaledStore(JournalBackend):
    # A definition is of both forms of the store, and this form refuses each call with a sentence
    # that has tests of its own; to the kit it is a store that does not coordinate.
    claim_trial = None

    def __init__(self, config):
        super().__init__(config)
        self._journals = {}

    def write(self, batch):
        self.write_group([batch])

    def write_group(self, batches):
        super().write_group(batches)
        for batch in batches:
            journal = self._find_journal(batch)
            if batch.number >= journal.end:
                journal.append([batch])
                journal.sync()

    def close(self):
        while self._journals:
            self._journals.popitem()[1].close()
        super().close()

    def _find_journal(self, batch):
        name = batch.run_id, batch.writer_id
        if name not in self._journals:
            self._journals[name] = self._open_journal(batch)
        return self._journals[name]

    def _open_journal(self, batch):
        run_path = self._layout.run_path(batch.run_id)
        folder = JournalFolder(journal_directory(run_path, batch.run_id) / batch.writer_id)
        about = {
            "run_id": batch.run_id,
            "writer_id": batch.writer_id,
            "attempt": batch.attempt,
            "rank": batch.rank,
        }
        folder.keep_manifest(
            Manifest(
                **about,
                project="conformance",
                storage_dir=str(self._storage_dir),
                run_path=str(run_path),
                lanes=(),
                process=current_process(),
            )
        )
        journal = Journal.reopen(folder.path, Origin(**about))
        journal.end = max((one.number + 1 for one in JournalReader(folder.path).read()), default=0)
        return journal


def open_journaled(config):
    return JournaledStore(config)


def define():
    (embedded,) = quark_register_backends()
    return dataclasses.replace(
        embedded,
        name="journal",
        open=open_journaled,
        capabilities=embedded.capabilities - {Capability.COORDINATION},
    )
