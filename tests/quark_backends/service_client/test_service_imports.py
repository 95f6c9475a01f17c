"""Runs of other tools are taken into a service as into a store on the disk."""

from pathlib import Path

import pytest

import quark
from quark.importing.importer import ImportOptions, open_intake
from quark.importing.neutral_run import ForeignFile, ForeignRun, PointList, Portion, RunFacts


class SmallRun(ForeignRun):
    key = "small"

    def __init__(self, count):
        self.count = count

    def describe(self):
        return RunFacts(identity="small", project="p", config={"lr": 1}, started_us=10**15)

    def read(self, position, losses):
        at = position.get("at", 0)
        while at < self.count:
            points = PointList()
            for step in range(at, at + 10):
                points.add("loss", step, step / 2, 1e9 + step)
            at += 10
            file = ForeignFile(artifact_type="file", name="f", content=f"at {at}".encode())
            yield Portion(position={"at": at}, points=points.take(), files=[file])


@pytest.mark.long
def test_a_run_is_imported_into_a_service_once(service, tmp_path):
    place = Path(tmp_path / "here")
    with open_intake(place, "test", ImportOptions()) as intake:
        first = intake.take(SmallRun(30))
    with open_intake(place, "test", ImportOptions()) as intake:
        second = intake.take(SmallRun(50))
        third = intake.take(SmallRun(50))
    assert (first.failure, first.points, first.files) == (None, 30, 3)
    assert (second.points, second.files, third.points) == (20, 2, 0)
    run = quark.open_run(first.run_id, storage_dir=place)
    columns = quark.MetricsLogger(run).columns(metric_key="loss")
    assert columns["step"].tolist() == list(range(50))
    assert run.context.run.status == "completed"
    artifacts = quark.ArtifactStore(run)
    assert [artifacts.load(one) for one in artifacts.read()] == [
        f"at {at}".encode() for at in range(10, 51, 10)
    ]
