"""The two tiers of the tests: what `make test` runs, and what only the long tier does.

A test that is marked `long` is left out by `make test`: mark those that cost more than a quarter of
a second of the processor, so that all others are run in some minutes. Of one that is marked
`sampled` the first case is in `make test`, as a witness, and the others are long; of each file of
tests with a browser it is the first test. One with examples drawn by Hypothesis is in both: with a
fifth of its examples in `make test`, and with all of them in the long tier, which loads the profile
"full". At the end of a run those tests are named that cost much and are not marked, so that none
grows unseen; the figure is of the processor, which a busy machine does not change, and it fails
nothing. What fails a whole run of `make test` is a folder that takes more of all tests' time on the
clock than its share in time_budgets.toml: a share, since a busy machine slows all folders alike.
"""

import os
import re
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A test that takes so long is named at the end of the run, unless it is of the long tier.
DEAR_CPU_S = 1.5

# No deadline and no bound on drawing, since a slow machine is no failure. One run or store may
# serve all examples. They are the same in every run of a tree, so that a change is held up by what
# it does and by nothing else; QUARK_EXAMPLES=random draws new ones, to look for more.
for _profile, _examples in (("short", 20), ("full", 100)):
    settings.register_profile(
        _profile,
        deadline=None,
        max_examples=_examples,
        derandomize=os.environ.get("QUARK_EXAMPLES") != "random",
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
settings.load_profile("short")


def count_examples(full):
    """How many examples a test draws in this tier that draws `full` of them in the long one."""
    return max(2, full * settings().max_examples // 100)


def read_cpu_s():
    """Seconds of the processor: this process and those children that it has waited for."""
    return sum(os.times()[:4])


def pytest_ignore_collect(collection_path, config):
    """A file that is long as a whole is not imported where no long test is run."""
    if config.option.markexpr != "not long" or collection_path.suffix != ".py":
        return None
    return True if _LONG_FILE.search(collection_path.read_text("utf-8")) else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        has_browser = item.path.parent.name == "browser"
        if has_browser or item.get_closest_marker("sampled"):
            test = (item.parent.nodeid, None if has_browser else item.originalname)
            if test in seen:
                item.add_marker(pytest.mark.long)
            seen.add(test)
        # The kit's tests are an author's too, whose pytest may know no such mark.
        elif _read_size(item) == "long":
            item.add_marker(pytest.mark.long)


def _read_size(item):
    """`long` or `short` of those tests of the conformance kit that are there twice."""
    is_of_the_kit = hasattr(item.cls, "CLOSE_LIMIT_S") and hasattr(item, "callspec")
    return item.callspec.params.get("size") if is_of_the_kit else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A run that may take so long only skips by name what it does not come to."""
    end = os.environ.get("TESTS_END_AT")
    if end and time.time() > float(end):
        pytest.skip("no time is left for it in this run (TESTS_END_AT)")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    before = read_cpu_s()
    item.config.stash[_STARTED] = before
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and not item.get_closest_marker("long"):
        spent = read_cpu_s() - item.config.stash[_STARTED]
        report.user_properties.append(("cpu_s", spent))
    return report


def pytest_runtest_logreport(report):
    _WALL_S[name_folder(report.nodeid)] += report.duration


def name_folder(nodeid):
    """The folder that a test counts for: `quark/cli` for a test of tests/quark/cli."""
    folders = nodeid.split("::")[0].removeprefix("tests/").split("/")[:-1]
    return "/".join(folders[:2])


def list_overruns(wall_s, budgets):
    """Says of each folder that takes more than its share of the time; `budgets` are per cent."""
    whole = sum(wall_s.values())
    shares = {folder: 100 * spent / whole for folder, spent in wall_s.items()}
    return [
        f"{folder or 'tests'} takes {share:.1f} % of the time of all tests, and may take "
        f"{budgets.get(folder, budgets['others'])} %: make its tests quicker, or mark them long"
        for folder, share in sorted(shares.items())
        if share > budgets.get(folder, budgets["others"])
    ]


@pytest.hookimpl(tryfirst=True)  # before the summary is printed
def pytest_sessionfinish(session):
    option = session.config.option
    # Of a part of the tests the shares say nothing.
    is_whole = option.markexpr == "not long" and not option.file_or_dir and not option.keyword
    if hasattr(session.config, "workerinput") or not is_whole or session.exitstatus != 0:
        return
    budgets = tomllib.loads((Path(__file__).parent / "time_budgets.toml").read_text())
    session.config.stash[_OVERRUNS] = list_overruns(_WALL_S, budgets)
    if session.config.stash[_OVERRUNS]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if overruns := terminalreporter.config.stash.get(_OVERRUNS, []):
        terminalreporter.section("folders over their share of the time (time_budgets.toml)")
        for line in overruns:
            terminalreporter.line(line)
    if os.environ.get("TESTS_SHOW_TIME"):
        terminalreporter.section("time of each folder: seconds on the clock, per cent")
        whole = sum(_WALL_S.values())
        for folder, spent in _WALL_S.most_common():
            terminalreporter.line(f"{spent:7.1f} s {100 * spent / whole:5.1f} %  {folder}")
    spent = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "cpu_s":
                    spent[report.nodeid] = value
    dear = [(name, cpu_s) for name, cpu_s in spent.most_common() if cpu_s >= DEAR_CPU_S]
    if dear:
        terminalreporter.section(f"over {DEAR_CPU_S} s of the processor, and not marked long")
        for name, cpu_s in dear:
            terminalreporter.line(f"{cpu_s:6.1f} s  {name}")


_LONG_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.long\b", re.MULTILINE)
_STARTED = pytest.StashKey[float]()
_WALL_S: Counter[str] = Counter()
_OVERRUNS = pytest.StashKey[list[str]]()
