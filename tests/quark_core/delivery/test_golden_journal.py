"""A journal of the first format is delivered for ever; what is newer or unknown is never lost.

`python tests/quark_core/delivery/test_golden_journal.py` writes the asset anew; once a format.
"""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import xxhash

import quark
from quark_core.delivery.delivery_state import LaneMark
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.journal_folder import JournalFolder, LaneEntry, Manifest
from quark_core.delivery.segments import FORMAT_VERSION, Origin, encode_frame, encode_header
from quark_core.records.json_object import JsonObject
from quark_core.runs import recovery
from quark_core.system.process import ProcessIdentity
from quark_core.testing.fakes import FIRST_TIME_US, BatchMaker

ASSET = Path(__file__).parents[2] / "assets" / "journal" / "1"
RUN, WRITER = "0123456789abcdef", "writer0"
PLACE = "STORAGE_DIR"


def make_batches():
    maker = BatchMaker(RUN, writer_id=WRITER)
    metadata = JsonObject({"split": "val", "n": [1, 2.5, None]})
    start = maker.start(project="golden", tags=["a"])
    # The process is that of whoever writes the asset; a fixed one keeps the asset the same.
    records = start.to_records()
    data = dict(records[0].data)
    data["process"] = {"host": "golden", "pid": 1, "started": "1"}
    records[0] = msgspec.structs.replace(records[0], data=JsonObject(data))
    # What a configuration has been told with since then.
    config = {name: value for name, value in records[1].data.items() if name != "origins"}
    records[1] = msgspec.structs.replace(records[1], data=JsonObject(config))
    from quark_core.records.codec import encode_records

    return [
        msgspec.structs.replace(start, body=encode_records(records)),
        maker.metrics(*[("train/loss", step, 1 / (step + 1)) for step in range(50)]),
        maker.metrics(("nan", 0, float("nan")), ("x@y", None, -0.0), metadata=metadata),
        maker.events("saved", payload=metadata, status="ok"),
        maker.lifecycle(("status", {"status": "completed"})),
    ]


def write_asset():
    shutil.rmtree(ASSET, ignore_errors=True)
    manifest = Manifest(
        run_id=RUN,
        writer_id=WRITER,
        attempt=0,
        rank=0,
        project="golden",
        storage_dir=PLACE,
        run_path=f"{PLACE}/.quark/runs/{RUN}",
        lanes=(LaneEntry("embedded", "embedded", True), LaneEntry("csv", "csv")),
        process=ProcessIdentity("golden", 1, "1"),
    )
    JournalFolder(ASSET).write_manifest(manifest)
    journal = Journal(ASSET, Origin(RUN, WRITER), segment_bytes=1_000)
    for batch in make_batches():
        journal.append([batch])
    journal.close()
    mark = LaneMark(ASSET / "lanes" / "csv.mark")
    mark.finish(1)
    mark.close()


@pytest.fixture
def golden(tmp_path):
    """The journal in a storage root, as a process of long ago left it."""
    folder = tmp_path / ".quark" / "runs" / RUN / "journal" / WRITER
    with quark.start_run(project="other", storage_dir=tmp_path):
        pass
    shutil.copytree(ASSET, folder)
    manifest = folder / "journal.json"
    manifest.write_text(manifest.read_text().replace(PLACE, str(tmp_path)))
    return folder


def test_the_asset_is_what_todays_reader_makes_of_it():
    found = list(JournalReader(ASSET).read())
    assert found == make_batches()
    assert len(list(ASSET.glob("*.qj"))) >= 2
    manifest = JournalFolder(ASSET).read_manifest()
    assert (manifest.run_id, manifest.writer_id) == (RUN, WRITER)
    assert JournalFolder(ASSET).mark("csv").done == 1


def test_a_journal_of_the_first_format_is_delivered(tmp_path, golden):
    results = {result.backend: result for result in recovery.sync(tmp_path)}
    assert {name: result.state for name, result in results.items()} == {
        "embedded": "delivered",
        "csv": "delivered",
    }
    assert results["embedded"].delivered == results["csv"].delivered + 2  # what the mark passed
    session = quark.open_run(RUN, tmp_path)
    assert (session.status, session.project_name) == ("completed", "golden")
    metrics = quark.MetricsLogger(session).read(include_non_finite=True)
    expected = [record for batch in make_batches()[1:3] for record in batch.to_records()]
    assert [repr(record) for record in metrics] == [repr(record) for record in expected]
    assert metrics[0].time_us >= FIRST_TIME_US
    (event,) = quark.EventLogger(session).read()
    assert event.payload == {"split": "val", "n": [1, 2.5, None]}


def test_fields_of_a_manifest_that_are_not_known_are_passed_over(tmp_path, golden):
    manifest = golden / "journal.json"
    content = json.loads(manifest.read_text())
    content["something_new"] = {"a": 1}
    content["lanes"][0]["other"] = 2
    manifest.write_text(json.dumps(content))
    assert {result.state for result in recovery.sync(tmp_path)} == {"delivered"}


def make_newer(header):
    """The header as a Quark of the next format would write it."""
    head = header[:4] + (FORMAT_VERSION + 1).to_bytes(2, "little") + header[6:-8]
    return head + xxhash.xxh3_64_digest(head)[::-1]


def add_segment(folder, name, data):
    (folder / name).write_bytes(data)


@pytest.mark.long
def test_a_segment_of_a_newer_version_is_left_alone_and_reported(tmp_path, golden):
    header = make_newer(encode_header(RUN, WRITER, 0, 0, 5))
    data = header + os.urandom(100)
    add_segment(golden, "00000099.qj", data)
    for result in (*recovery.sync(tmp_path), *recovery.sync(tmp_path)):
        (damage,) = result.damage
        assert f"version {FORMAT_VERSION + 1}" in damage
    assert (golden / "00000099.qj").read_bytes() == data
    metrics = quark.MetricsLogger(quark.open_run(RUN, tmp_path))
    assert len(metrics.read()) == 52
    assert len(metrics.read(include_non_finite=False)) == 51


def test_a_journal_that_holds_only_what_is_newer_is_not_called_delivered(tmp_path, golden):
    for path in golden.glob("*.qj"):
        data, header = path.read_bytes(), encode_header(RUN, WRITER, 0, 0, 0)
        path.write_bytes(make_newer(data[: len(header)]) + data[len(header) :])
    before = {path.name: path.read_bytes() for path in golden.glob("*.qj")}
    results = recovery.sync(tmp_path)
    assert all(result.damage for result in results)
    assert {path.name: path.read_bytes() for path in golden.glob("*.qj")} == before
    assert JournalFolder(golden).mark("embedded").done == 0


@pytest.mark.long
def test_an_unknown_kind_of_record_goes_to_the_quarantine(tmp_path, golden):
    known = make_batches()
    strange = msgspec.structs.replace(known[3], number=5, kind="something_new", body=b"\x01abc")
    later = BatchMaker(RUN, writer_id=WRITER).metrics(("later", 0, 7.0))
    later = msgspec.structs.replace(later, number=6)
    data = encode_header(RUN, WRITER, 0, 0, 5) + encode_frame(strange) + encode_frame(later)
    add_segment(golden, "00000099.qj", data)
    recovery.sync(tmp_path)
    metrics = quark.MetricsLogger(quark.open_run(RUN, tmp_path))
    assert [record.value for record in metrics.read(metric_key="later")] == [7.0]
    # It is in the store as it came, or beside it with the reason: never nowhere.
    quarantined = [one for one in recovery.count_quarantined(tmp_path) if one.backend == "embedded"]
    if not quarantined:
        reader = quark.open_run(RUN, tmp_path).open_run.reader
        kept = reader.read_batches(RUN, WRITER, 5, 1)
        assert kept == [strange]


if __name__ == "__main__":
    write_asset()
