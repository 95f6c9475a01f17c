"""The W&B mirror passes the conformance kit."""

import re
from importlib.util import find_spec

import pytest

from quark_backends.mirror_state import load_state
from quark_backends.wandb.history import StepRows
from quark_backends.wandb.local_files import WandbState
from quark_core.records.names import encode_name
from quark_core.testing.conformance import ODD_KEYS, BackendConformance

if find_spec("wandb") is None:
    pytest.skip("needs wandb", allow_module_level=True)

PAIR = (("train/loss", 0.5), ("train/acc", 0.25))
NO_ORDER = "W&B stores the points of one step as one row without key order"

BY_STEP = "W&B orders rows by step, as far as they are buffered together"


def find_key(name):
    """The key of a series, which is named as the user wrote it, but for `_`, and by its rank."""
    return encode_name(re.sub("^key_", "_", re.sub("^rank[0-9]+/", "", name)))


def list_held(run_path, mirrored):
    """The values of parts that wait for the rows of their steps."""
    sent = {mark for row in mirrored.rows for mark in row.get("quark/seq", "").split()}
    states = [load_state(path, WandbState) for path in run_path.glob("mirrors/wandb/*/state.json")]
    parts = [part for state in states for part in StepRows(state).give_up()]
    return [part.values for part in parts if part.mark not in sent]


@pytest.mark.long
class TestWandb(BackendConformance):
    TITLE = "W&B mirror, offline"
    # Its library alone takes seconds to load, and minutes on a busy machine.
    TIME_LIMIT_S, CLOSE_LIMIT_S = 240.0, 60.0
    EXPECTED_FAILURES = {
        "test_a_written_batch_is_in_the_store": NO_ORDER,
        "test_odd_names_are_kept_apart": NO_ORDER,
        "test_steps_may_repeat_and_go_backwards": BY_STEP,
        "test_another_writer_of_an_attempt_is_taken": BY_STEP,
    }

    @pytest.fixture
    def definition(self, definition):
        return definition

    @pytest.fixture
    def config(self, config):
        return config

    @pytest.fixture
    def observe(self, config, read_mirror):
        def read():
            mirrored = read_mirror(config.run_path)
            # What is acknowledged is in W&B's file or held in the mirror's state.
            rows = [*mirrored.rows, *list_held(config.run_path, mirrored)]
            return [
                (find_key(key), row.get("quark/step"), row[key])
                for row in rows
                for key in sorted(row)
                if not key.startswith(("_", "quark/"))
            ]

        return read

    # What is expected to fail for the order of a row's keys alone, without that order.

    def test_a_written_batch_is_in_the_rows(self, open_backend, maker, observe):
        backend = open_backend()
        backend.write(maker.start())
        for step in range(3):
            backend.write(maker.metrics(("train/loss", step, 0.5), ("train/acc", step, 0.25)))
            expected = {(k, s, v) for s in range(step + 1) for k, v in PAIR}
            found = observe()
            assert (len(found), set(found)) == (2 * step + 2, expected)

    def test_names_that_look_alike_are_kept_apart(self, open_backend, maker, observe):
        rows = [(key, 1, float(index)) for index, key in enumerate(dict.fromkeys(ODD_KEYS))]
        backend = open_backend()
        backend.write(maker.start())
        backend.write(maker.metrics(*rows))
        assert sorted(observe()) == sorted(rows)
