"""Sweeps over real stores."""

import pytest
from sweep_training import SPACE

import quark
from quark.sweeps.trial import current_trial


@pytest.fixture
def root(tmp_path):
    """A storage root."""
    return tmp_path / "runs"


@pytest.fixture
def open_sweep(root):
    """Opens sweeps over the root, and closes them in the end."""
    opened = []

    def open_it(name="lr", **changes):
        arguments = {
            "project": "digits", "space": SPACE, "metric": "val/acc", "mode": "max", "trials": 4,
            "storage_dir": root, **changes,
        }  # fmt: skip
        sweep = quark.sweep(name, **arguments)
        opened.append(sweep)
        return sweep

    yield open_it
    for sweep in opened:
        sweep.close()


@pytest.fixture(autouse=True)
def no_trial_is_left():
    """Each test ends with no trial of this process."""
    yield
    assert current_trial.get() is None
