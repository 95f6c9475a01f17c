"""The programs of the public guide, as they are, with a service set in the environment."""

import pytest
import test_guide

globals().update({n: f for n, f in vars(test_guide).items() if n.startswith("test_")})


@pytest.fixture(autouse=True)
def over_the_service(service, tmp_path):
    yield
    assert not list(tmp_path.glob(".quark/*.db"))
