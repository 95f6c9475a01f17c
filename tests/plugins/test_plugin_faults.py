"""Installed plugins that break: one clear message each, and the run and the others untouched.

Each is a distribution on the path of a process of its own, as an installed
one would be; the process trains with it, with a good backend and a CSV mirror.
"""

import re

import pytest

HEAD = """
import sys, threading, time
from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.hookspecs import hookimpl

class Kept:
    count = 0
    def write(self, batch):
        Kept.count += batch.count
    def close(self): pass

def declare(name, open_it, **fields):
    class Plugin:
        @hookimpl
        def quark_register_backends(self):
            return [BackendDefinition(name=name, summary="s", open=open_it, **fields)]
    return Plugin()
"""
GOOD = HEAD + "plugin = declare('good', lambda config: Kept())\n"
BAD = {
    "import error": "import no_such_client",
    "exit at import": "sys.exit(3)",
    "older version": "plugin = declare('bad', lambda config: Kept(), api_version=0)",
    "newer version": "plugin = declare('bad', lambda config: Kept(), api_version=99)",
    "no definition": "plugin = declare('bad name', lambda config: Kept())",
    "undeclared": """
        class Reads(Kept):
            def read(self, run_id, kind, query): ...
            def load_run(self, run_id): ...
            def list_runs(self, *, project=None, limit=None): ...
        plugin = declare('bad', lambda config: Reads())""",
    "declared": """
        can = frozenset({Capability.READ})
        plugin = declare('bad', lambda config: Kept(), capabilities=can)""",
    "nothing opened": "plugin = declare('bad', lambda config: None)",
    "exit at open": "plugin = declare('bad', lambda config: sys.exit(3))",
    "error at open": "plugin = declare('bad', lambda config: 1 / 0)",
    "hang at open": "plugin = declare('bad', lambda config: time.sleep(1000))",
    "exit at write": """
        class Exits(Kept):
            def write(self, batch): sys.exit(3)
        plugin = declare('bad', lambda config: Exits())""",
    "interrupt at write": """
        class Interrupts(Kept):
            def write(self, batch): raise KeyboardInterrupt
        plugin = declare('bad', lambda config: Interrupts())""",
    "hang at write": """
        class Hangs(Kept):
            def write(self, batch): threading.Event().wait()
        plugin = declare('bad', lambda config: Hangs())""",
    "exit at close": """
        class Exits(Kept):
            def close(self): sys.exit(3)
        plugin = declare('bad', lambda config: Exits())""",
    "hang at close": """
        class Hangs(Kept):
            def close(self): threading.Event().wait()
        plugin = declare('bad', lambda config: Hangs())""",
}
# What is said of each that can be seen before a run, and of each that only a run shows.
LEFT_OUT = {
    "import error": "import failed: ModuleNotFoundError: No module named 'no_such_client'",
    "exit at import": "import failed: SystemExit: 3",
    "older version": "it uses version 0 of the backend contract, but this Quark uses version 1",
    "newer version": "it uses version 99 of the backend contract, but this Quark uses version 1",
    "no definition": "its name 'bad name' must be one lowercase word",
}
FAILS = {
    "undeclared": "implements SupportsRead but does not declare read",
    "declared": "declares read but does not implement SupportsRead",
    "nothing opened": "opened NoneType, which has no write() and close()",
    "exit at open": "SystemExit: 3",
    "error at open": "ZeroDivisionError: division by zero",
    "hang at open": "bad",
    "exit at write": "SystemExit: 3",
    "interrupt at write": "KeyboardInterrupt",
    "hang at write": "bad",
    "exit at close": "SystemExit: 3",
    "hang at close": None,
}


def indent_away(source):
    return re.sub(r"(?m)^ {8}", "", source)


def tell_of(errors, word):
    """Lines that speak of a plugin, without the source line that a warning shows."""
    return [line for line in errors.splitlines() if word in line and not line.startswith("  ")]


@pytest.mark.sampled
@pytest.mark.parametrize("case", LEFT_OUT)
def test_one_that_nobody_asked_for_is_left_out_with_one_message(install, train, case):
    install("quark-bad", "bad", HEAD + indent_away(BAD[case]))
    install("quark-good", "good", GOOD)
    complete, errors = train("csv,good")
    assert complete == ["embedded", "csv", "good"]
    (line,) = tell_of(errors, "quark-bad")
    assert f"from quark-bad: {LEFT_OUT[case]}" in line
    assert "Traceback" not in errors


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in LEFT_OUT if case != "no definition"])
def test_one_that_was_asked_for_is_an_error_at_the_start(install, train, case):
    install("quark-bad", "bad", HEAD + indent_away(BAD[case]))
    errors = train("csv,bad", expect=1)
    last = errors.strip().splitlines()[-1]
    assert last.endswith(f"backend 'bad' from quark-bad cannot be used: {LEFT_OUT[case]}")


@pytest.mark.sampled
@pytest.mark.parametrize("case", FAILS)
def test_one_that_breaks_in_a_run_costs_only_itself(install, train, case):
    install("quark-bad", "bad", HEAD + indent_away(BAD[case]))
    install("quark-good", "good", GOOD)
    # Most never take what there is for them, and the end waits for that.
    patience_s = "30" if case == "exit at close" else "10"
    complete, errors = train("csv,bad,good", QUARK_EXIT_TIMEOUT_SECONDS=patience_s)
    assert complete[:2] == ["embedded", "csv"]
    assert "good" in complete
    assert ("bad" in complete) == ("close" in case)
    assert "Traceback" not in errors
    if FAILS[case] is not None:
        told = tell_of(errors, "bad")
        assert any(FAILS[case] in line for line in told), errors
        reasons = [re.search(r"\((.*)\)", line) for line in told if "accepts no records" in line]
        assert len(reasons) <= 1, errors


@pytest.mark.long
def test_of_two_that_bring_one_name_the_first_stays(install, train):
    install("quark-first", "good", GOOD)
    install("quark-second", "other", HEAD + "plugin = declare('good', lambda config: 1 / 0)")
    complete, errors = train("csv,good")
    assert complete == ["embedded", "csv", "good"]
    (line,) = tell_of(errors, "quark-second")
    assert "plugin 'good' from quark-second: its name is already used by quark-first" in line


@pytest.mark.long
def test_a_built_in_backend_cannot_be_taken_over(install, train):
    install("quark-bad", "aaa", HEAD + "plugin = declare('csv', lambda config: 1 / 0)")
    complete, errors = train("csv")
    assert complete == ["embedded", "csv"]
    (line,) = tell_of(errors, "quark-bad")
    assert "its name is already used by quark-tracker" in line
