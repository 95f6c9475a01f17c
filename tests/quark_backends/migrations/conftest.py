"""A store of an older version, as it was kept, and what must be read out of it."""

import json
import shutil
import sqlite3
from pathlib import Path

import golden_store
import msgspec
import pytest

from quark_backends.store.databases.sqlite import OLDEST_VERSION
from quark_core.system.process import current_process

STORES = Path(__file__).parents[2] / "assets" / "stores"


class OldStore:
    """A copy of the store of one version, under a storage root of its own."""

    def __init__(self, version, root):
        self.version = version
        self.root = root
        self.folder = root / ".quark"
        self.db_path = self.folder / "quark.db"
        self.expected = json.loads((STORES / str(version) / "expected.json").read_text("utf-8"))
        shutil.copytree(STORES / str(version) / "store", self.folder)

    def read_files(self):
        """Content of the store's files, without what SQLite makes beside the database."""
        return {name: (self.folder / name).read_bytes() for name in ("quark.db", "store.json")}

    def edit(self, *statements):
        """Change the database as somebody else would, and leave it whole in one file."""
        database = sqlite3.connect(self.db_path, isolation_level=None)
        for statement in statements:
            database.execute(*statement)
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()

    def read_version(self):
        """Version of the tables, as SQLite has it."""
        database = sqlite3.connect(self.db_path)
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.close()
        return version

    def revive(self, identity=None):
        """Make the run that was left running one that a process, this one by default, writes."""
        process = msgspec.json.encode(identity or current_process()).decode()
        self.edit(("UPDATE run SET process = ? WHERE id = 'killed'", (process,)))

    def describe(self):
        """What is read out of it, in the form of `expected`."""
        return json.loads(json.dumps(golden_store.describe_store(self.root)))


@pytest.fixture
def copy_store(tmp_path):
    """Makes a copy of the store of the oldest version under a name."""
    return lambda name="old": OldStore(OLDEST_VERSION, tmp_path / name)


@pytest.fixture
def old_store(copy_store):
    """The store of the version before."""
    return copy_store()
