"""The language of searches means the same in PostgreSQL, whatever is asked."""

import pytest
import test_search_equivalence
from postgres_server import open_database
from postgres_stores import empty_tables
from search_stores import SearchStore
from stores import list_tables
from test_search_equivalence import (  # noqa: F401
    crowd,
    test_every_comparison_agrees,
    test_every_order_agrees,
    test_sql_and_python_agree,
)

from quark_backends.store.reading.reader import StoreReader


def copy_rows(source, target):
    """All rows of a store in SQLite, with their keys."""
    empty_tables(target)
    target.begin_write()
    for table in list_tables():
        columns = source.execute(f"PRAGMA table_info({table})").fetchall()
        names = ", ".join(column[1] for column in columns)
        marks = ", ".join("?" * len(columns))
        rows = source.execute(f"SELECT {names} FROM {table}").fetchall()
        target.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)
    target.commit()


@pytest.fixture(scope="module")
def database(postgres_url):
    with open_database(postgres_url) as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def searches_in_postgres(database):
    """What the tests search lies in PostgreSQL."""

    class PostgresSearchStore(SearchStore):
        def __init__(self, runs):
            super().__init__(runs)
            connection = database.connect()
            try:
                copy_rows(self.connection, connection)
            finally:
                connection.close()
            self.finder = StoreReader(database.connect)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_search_equivalence, "SearchStore", PostgresSearchStore)
        yield


@pytest.mark.long
def test_many_search_at_once(database, crowd):  # noqa: F811
    from concurrent.futures import ThreadPoolExecutor

    from quark_core.runs.run_search import build_search

    store, _ = crowd
    # Another test of this file may have put its own runs there since.
    connection = database.connect()
    try:
        copy_rows(store.connection, connection)
    finally:
        connection.close()
    search = build_search(where="loss < 1 or config.lr != null")
    wanted = [run.run_id for run in store.finder.search(search)]
    assert wanted
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: store.finder.search(search), range(40)))
    assert [[run.run_id for run in one] for one in found] == [wanted] * 40
