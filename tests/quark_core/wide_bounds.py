"""Bounds made wide for tests of something else, on a machine that stands still for seconds.

How long Quark waits for a store or for what is late is promised, and has tests of its own. All
others would fail by it wherever their processes are kept from running for that long.

    with widened(STARTS):                               # here, and in the children of here
        ...
    subprocess.run(..., env={**os.environ, **widen_in_children(STARTS)})
"""

import contextlib
import importlib
import json
import os
from pathlib import Path

import pytest

WIDE_S = 60.0
STARTS = ("quark_core.runs.primary_store._FIRST_S",)
"""How long a first start waits for a service."""
ENDINGS = (
    "quark_core.runs.environment._ENDING_S",
    "quark_core.runs.open_run._ENVIRONMENT_TIMEOUT_S",
)
"""How long an end waits for what a run is made of; QUARK_EXIT_TIMEOUT_SECONDS bounds it too."""
DRAINS = ("quark_core.system.console.descriptors._DRAIN_TIMEOUT_S",)
"""How long an end waits for what a descriptor has taken up."""
OTHERS = ("quark_core.runs.rank_roles._IDLE_WAIT_S", "quark_core.runs.primary_store._HOLD_S")
"""How long a start waits for another process: to learn its run, and for the same configuration.

QUARK_LAUNCH_TIMEOUT_SECONDS bounds the first too.
"""

FOLDER = str(Path(__file__).with_name("child_bounds"))


def widen_in_children(*bounds):
    """The variables by which children that are started with them have these bounds wide."""
    by_module = json.loads(os.environ.get("TESTS_BOUNDS") or "{}")
    for bound in [name for names in bounds for name in names]:
        module, _, name = bound.rpartition(".")
        by_module.setdefault(module, {})[name] = WIDE_S
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if FOLDER not in path:
        path.append(FOLDER)
    return {"PYTHONPATH": os.pathsep.join(path), "TESTS_BOUNDS": json.dumps(by_module)}


def keep_sources_in_children():
    """The variables of trainings that keep their sources.

    They end at once, and on a busy machine what they are made of is found out later than that.
    """
    return {
        "QUARK_SOURCES": "keep",
        "QUARK_EXIT_TIMEOUT_SECONDS": "100",
        **widen_in_children(ENDINGS),
    }


@contextlib.contextmanager
def widened(*bounds):
    """These bounds are wide, in this process and in the children that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for bound in [name for names in bounds for name in names]:
            module, _, name = bound.rpartition(".")
            patch.setattr(importlib.import_module(module), name, WIDE_S)
        for name, value in widen_in_children(*bounds).items():
            patch.setenv(name, value)
        yield
