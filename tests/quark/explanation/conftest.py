"""What the tests of explanations share."""

import pytest
from known_project import Project


@pytest.fixture
def project(tmp_path):
    """Makes runs whose accuracy is a law of their configuration, with noise of its own seed."""
    return Project(tmp_path / "root")
