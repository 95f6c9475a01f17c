"""What all tests of what looks at PyTorch models share."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whichever ran before it in its process."""
    torch.manual_seed(0)
