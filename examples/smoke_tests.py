"""Check an installation of Quark: grouped checks, each a line, exit status 1 if one fails.

    python examples/smoke_tests.py [GROUP ...]

Groups: imports, session, metrics, events, backends, faults. Everything is
written to a temporary folder and taken away again.
"""

from __future__ import annotations

import math
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

Check = Callable[[Path], None]
CHECKS: dict[str, list[Check]] = {}


def check(group: str) -> Callable[[Check], Check]:
    """Register a check in a group."""

    def register(function: Check) -> Check:
        CHECKS.setdefault(group, []).append(function)
        return function

    return register


def expect(condition: object, message: str) -> None:
    """Fail the running check."""
    if not condition:
        raise AssertionError(message)


@check("imports")
def public_names_can_be_imported(_: Path) -> None:
    import quark

    for name in quark.__all__:
        getattr(quark, name)


@check("session")
def run_is_started_tagged_and_ended(folder: Path) -> None:
    import quark

    with quark.start_run(project="smoke", config={"lr": 0.1}, storage_dir=folder) as session:
        session.add_tag("smoke")
    stored = quark.open_run(session.run_id, folder)
    expect(stored.status == "completed", f"the run is {stored.status}, not completed")
    expect(stored.context.run.tags == ("smoke",), f"tags are {stored.context.run.tags}")


@check("session")
def exception_ends_the_run_as_failed(folder: Path) -> None:
    import quark

    try:
        with quark.start_run(project="smoke", storage_dir=folder) as session:
            raise RuntimeError("planted")
    except RuntimeError:
        pass
    expect(quark.open_run(session.run_id, folder).status == "failed", "the run did not fail")


@check("metrics")
def values_come_back_as_they_were_logged(folder: Path) -> None:
    import quark

    with (
        quark.start_run(project="smoke", storage_dir=folder) as session,
        quark.MetricsLogger(session) as metrics,
    ):
        for step in range(1000):
            metrics.log("train/loss", math.exp(-step / 100), step=step)
        back = [record.value for record in metrics.read(metric_key="train/loss")]
        expect(back == [math.exp(-step / 100) for step in range(1000)], "values differ")


@check("events")
def logs_carry_their_severity(folder: Path) -> None:
    import quark

    with (
        quark.start_run(project="smoke", storage_dir=folder) as session,
        quark.EventLogger(session) as events,
    ):
        events.add_log("something is odd", identifier="Warning", step=3)
        found = events.read(severity="warning")
        expect(len(found) == 1 and found[0].step == 3, f"found {found}")


@check("backends")
def csv_mirror_gets_everything(folder: Path) -> None:
    import quark

    with (
        quark.start_run(project="smoke", storage_dir=folder, backends="csv") as session,
        quark.MetricsLogger(session) as metrics,
    ):
        metrics.log_many({"a": 1.0, "b": 2.0}, step=0)
    # In the run's folder here, whichever store the run itself went to.
    (path,) = folder.rglob("metrics_long.csv")
    lines = path.read_text().splitlines()
    expect(len(lines) == 3, f"metrics_long.csv has {len(lines)} lines, not 3")
    expect(session.report_delivery().complete, "not everything was delivered")


@check("faults")
def bad_input_names_the_argument(folder: Path) -> None:
    import quark

    with (
        quark.start_run(project="smoke", storage_dir=folder) as session,
        quark.MetricsLogger(session) as metrics,
    ):
        try:
            metrics.log("loss", 1.0)
        except quark.SchemaValidationError as error:
            expect("step" in str(error), f"the error does not name step: {error}")
        else:
            expect(False, "a metric without step and epoch was accepted")


def main() -> int:
    wanted = sys.argv[1:] or list(CHECKS)
    unknown = [group for group in wanted if group not in CHECKS]
    if unknown:
        print(f"unknown group {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        return 2
    failed = 0
    for group in wanted:
        for function in CHECKS[group]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    function(Path(folder))
                    verdict = "ok"
                except Exception:
                    failed += 1
                    verdict = "FAILED\n" + traceback.format_exc()
            print(f"{group:<9} {function.__name__.replace('_', ' '):<42} {verdict}")
    print(f"{failed} failed" if failed else "Quark works here.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
