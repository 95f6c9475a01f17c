"""Real W&B, offline: its own files are read back, record by record."""

import contextlib
import json
import struct
import time
from functools import cached_property

import pytest

from quark_backends.wandb.plugin import quark_register_backends
from quark_core.runs.late_delivery import wait_for_late_delivery

AXES = {"quark/step", "quark/epoch", "quark/time", "quark/attempt", "quark/seq"}
BLOCK_BYTES = 32768


def read_wandb_file(path):
    """Every record of one of W&B's files, as W&B's own classes."""
    from wandb.proto import wandb_internal_pb2 as pb

    data = path.read_bytes()
    if len(data) < 7:
        return []  # it is being made
    assert data[:4] == b":W&B"
    found, position, parts = [], 7, b""
    while position + 7 <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        if position + size > len(data):
            break
        parts += data[position : position + size]
        position += size
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def parse_json(text):
    # W&B writes a float without a fraction as an integer, its sign included.
    return json.loads(text, parse_int=lambda digits: -0.0 if digits == "-0" else int(digits))


def make_dict(items):
    found = {}
    for item in items:
        *path, last = item.nested_key or [item.key]
        place = found
        for name in path:
            place = place.setdefault(name, {})
        place[last] = parse_json(item.value_json)
    return found


def list_files(run_path):
    found = run_path.glob("mirrors/wandb/*/wandb/*run-*/*.wandb")
    return sorted(path for path in found if "latest" not in str(path))


class Mirrored:
    """What W&B's files of a run say, those of several processes one after the other."""

    def __init__(self, run_path, paths=None):
        self.paths, self.records = [], []
        if paths is None and run_path.parents[1].name == ".quark":
            # On a busy machine W&B's process ends after the run, and another one joins its files.
            wait_for_late_delivery(run_path.parents[2])
        # A process that ends joins folders meanwhile.
        while paths is None and (found := list_files(run_path)) != self.paths:
            with contextlib.suppress(FileNotFoundError):
                self.records = [record for path in found for record in read_wandb_file(path)]
                self.paths = found
        if paths is not None:
            self.paths = paths
            self.records = [record for path in paths for record in read_wandb_file(path)]

    def of(self, kind):
        return [
            getattr(each, kind) for each in self.records if each.WhichOneof("record_type") == kind
        ]

    @cached_property
    def rows(self):
        return [make_dict(history.item) for history in self.of("history")]

    @cached_property
    def axes(self):
        """Key or pattern -> its axis, as the newest definition has it."""
        defined = ((each.name or each.glob_name, each.step_metric) for each in self.of("metric"))
        return {name: axis for name, axis in defined if axis}

    def find_axis(self, key):
        patterns = (name for name in self.axes if name.endswith("/*") and key.startswith(name[:-1]))
        name = key if key in self.axes else next(patterns, "*")
        return self.axes.get(name, "_step")

    def points(self, key):
        """Step and value of each point, the step as W&B finds it; None on an axis of others."""
        axis = self.find_axis(key)
        has_steps = axis.endswith("step")
        return [(row.get(axis) if has_steps else None, row[key]) for row in self.rows if key in row]

    @cached_property
    def keys(self):
        own = {key for row in self.rows for key in row if key.startswith("_")} | AXES
        own |= set(self.axes.values())
        return {key for row in self.rows for key in row} - own

    @property
    def config(self):
        updates = [run.config.update for run in self.of("run")]
        updates += [config.update for config in self.of("config")]
        return {key: value for each in updates for key, value in make_dict(each).items()}

    @property
    def summary(self):
        return {
            key: value
            for each in self.of("summary")
            for key, value in make_dict(each.update).items()
        }

    @property
    def exit_codes(self):
        return [exit_.exit_code for exit_ in self.of("exit")]


@pytest.fixture
def read_mirror():
    return Mirrored


@pytest.fixture
def definition():
    return quark_register_backends()[0]


@pytest.fixture(autouse=True)
def offline(monkeypatch, known):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("QUARK_EXIT_TIMEOUT_SECONDS", "60")
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def deliver():
    """Wait until the mirror has everything that was logged so far."""

    def wait(session, timeout_s=200):
        (lane,) = [each for each in session.open_run.stream._lanes if not each.primary]
        session.open_run.flush()
        deadline = time.monotonic() + timeout_s
        while lane.report().waiting:
            assert time.monotonic() < deadline, lane.report()
            lane.nudge()
            time.sleep(0.02)
        return lane.report()

    return wait
