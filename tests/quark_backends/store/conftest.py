"""A store for each test."""

import pytest
from stores import Store


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    yield made
    made.close()
