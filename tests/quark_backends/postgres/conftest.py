"""Stores in PostgreSQL."""

import pytest
from postgres_stores import PostgresStore


@pytest.fixture
def store(postgres_database):
    made = PostgresStore(postgres_database)
    yield made
    made.close()
