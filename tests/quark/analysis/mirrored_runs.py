"""Runs with mirrors, and what the mirrors have of them."""

import csv
import threading
import time

import quark
from quark_core.delivery.journal import split_generation
from quark_core.errors import BackendUnavailable
from quark_core.runs import recovery
from quark_core.testing.fakes import ScriptedBackend

KINDS = ("alerts", "health_scores", "phases")


class Choosy(ScriptedBackend):
    """Takes the run's records, and of what analyzers found nothing as long as there is a fault."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.asked = threading.Event()

    def write(self, batch):
        if self.fault is not None and split_generation(batch.writer_id) is not None:
            self.asked.set()
            if self.fault == "unavailable":
                raise BackendUnavailable("planted outage")
            self.release.wait()
        super().write(batch)


def start(path, **options):
    session = quark.start_run(project="p", storage_dir=path, **options)
    metrics = quark.MetricsLogger(session)
    for step in range(300):
        # The loss is lost at step 200, which no rule overlooks.
        metrics.log("train/loss", 1 / (step + 1) if step < 200 else float("nan"), step=step)
    return session


def reopen(path, session):
    """The run as another process sees it, with the backends that are installed now."""
    return quark.open_run(session.run_id, path)


def run_folder(path, session):
    return path / ".quark" / "runs" / session.run_id


def read_writers(folder):
    """Kind -> the generations in its CSV file, in order, each once."""
    found = {}
    for name in KINDS:
        file = folder / f"{name}.csv"
        lines = file.read_text().splitlines() if file.exists() else ()
        found[name] = list(dict.fromkeys(row["writer"] for row in csv.DictReader(lines)))
    return found


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def list_journals(path):
    return [folder.path.name for folder in recovery.find_folders(path)]


def list_records(backend, *kinds):
    found = [batch for batch in backend.stored if batch.kind in kinds]
    return [(batch.writer_id, batch.kind, batch.number) for batch in found]
