"""The conformance kit: a backend that passes it may be trusted with a run.

Subclass `BackendConformance` in a test module and override three fixtures:

    class TestMine(BackendConformance):
        @pytest.fixture
        def definition(self): return quark_register_backends()[0]

        @pytest.fixture
        def config(self, tmp_path): return BackendConfig(storage_dir=tmp_path, run_id="run0")

        @pytest.fixture
        def observe(self, config): ...

`config` opens an EMPTY store; `observe` returns a function that reads the
store WITHOUT the backend and returns the metrics of the run as (key, step,
value). Two more fixtures let more be tested: `outage` makes the store
unreachable for a while, `old_stores` gives stores of earlier versions.

Tests are skipped only for capabilities that the definition does not declare,
and for these two fixtures. What the backend cannot pass is named, with the
reason, in `EXPECTED_FAILURES`; a standard test that is overridden without
`xfail(reason=…)` fails the class. The plugin `quark_core.testing.report`
prints what was passed:

    pytest -p quark_core.testing.report tests/test_mine.py
"""

from __future__ import annotations

from typing import Any

from quark_core.testing.belonging_conformance import BelongingConformance
from quark_core.testing.coordination_conformance import CoordinationConformance
from quark_core.testing.following_conformance import FollowingConformance
from quark_core.testing.process_conformance import ProcessConformance
from quark_core.testing.reading_conformance import ArtifactConformance, ReadingConformance
from quark_core.testing.store_conformance import PrimaryConformance, StoreConformance
from quark_core.testing.workers_conformance import WorkersConformance
from quark_core.testing.writing_conformance import OnceConformance, WritingConformance


class BackendConformance(
    WritingConformance,
    OnceConformance,
    ReadingConformance,
    ProcessConformance,
    PrimaryConformance,
    StoreConformance,
    FollowingConformance,
    BelongingConformance,
    CoordinationConformance,
    WorkersConformance,
    ArtifactConformance,
):
    """Standard tests of a backend; see the module for how to use it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if not name.startswith("test_") or not hasattr(BackendConformance, name):
                continue
            marks = getattr(value, "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{cls.__name__} overrides the standard test {name}; "
                    "name it in EXPECTED_FAILURES, with the reason, if the backend cannot pass it"
                )
        for name, reason in cls.EXPECTED_FAILURES.items():
            if not hasattr(BackendConformance, name.split("[")[0]):
                raise TypeError(f"{cls.__name__}.EXPECTED_FAILURES: there is no test {name}")
            if not reason.strip():
                raise TypeError(f"{cls.__name__}.EXPECTED_FAILURES: {name} needs a reason")
