"""The TensorBoard mirror passes the conformance kit, but for what event files cannot hold."""

import contextlib
import re

import pytest
from hosted_tensorboard import DEFINITION

from quark_core.records.names import encode_name
from quark_core.testing.conformance import BackendConformance

loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")


def find_key(tag):
    """The key of a series, which is named as the user wrote it and by its rank."""
    return encode_name(re.sub("^rank[0-9]+/", "", tag))


class TestTensorboard(BackendConformance):
    TITLE = "TensorBoard mirror"
    # Its library alone takes seconds to load, and minutes on a busy machine.
    TIME_LIMIT_S, CLOSE_LIMIT_S = 240.0, 60.0
    EXPECTED_FAILURES = {
        "test_values_are_kept_exactly": "TensorBoard's scalars are float32",
        "test_finite_values_are_kept_exactly": "TensorBoard's scalars are float32",
        "test_steps_may_repeat_and_go_backwards": (
            "TensorBoard's points need a step; the epoch stands in for it"
        ),
    }

    @pytest.fixture
    def definition(self, definition):
        return definition

    @pytest.fixture
    def config(self, config):
        return config

    @pytest.fixture
    def observe(self, config):
        def read():
            found = []
            for path in sorted((config.run_path / "tensorboard").rglob("*tfevents*")):
                for data in loader.RawEventFileLoader(str(path)).Load():
                    event = event_pb2.Event.FromString(data)
                    found += [
                        (find_key(value.tag), event.step, value.simple_value)
                        for value in event.summary.value
                        if value.WhichOneof("value") == "simple_value"
                    ]
            return found

        return read

    @pytest.fixture
    def outage(self, config):
        """A file where the mirror's folder was."""
        folder = config.run_path / "tensorboard"
        aside = folder.with_name("aside")

        @contextlib.contextmanager
        def take_away():
            folder.rename(aside)
            folder.write_text("in the way")
            try:
                yield
            finally:
                folder.unlink()
                aside.rename(folder)

        return take_away


@pytest.mark.long
class TestTensorboardInItsHelper(TestTensorboard):
    """The same through the helper process in which lanes open it."""

    TITLE = "TensorBoard mirror, in its helper process"

    @pytest.fixture
    def definition(self):
        return DEFINITION
