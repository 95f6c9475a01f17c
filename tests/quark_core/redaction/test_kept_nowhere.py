"""Secrets planted in every place of a run: their bytes are nowhere that the run has written."""

import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from secrets_corpus import SHAPES, list_secrets

import quark
from quark_core.config.redaction import REDACTED
from quark_core.records import RECORD_TYPES, LifecycleRecord
from quark_core.records.codec import zstd
from quark_core.runs.open_run import OpenRun

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
CORPUS = list_secrets()
ROOT = Path(__file__).resolve().parents[3]


def open_frames(data: bytes) -> bytes:
    """What the zstd frames in a file hold, wherever they begin: bodies lie compressed in it."""
    opened = []
    for match in re.finditer(re.escape(ZSTD_MAGIC), data):
        try:
            opened.append(zstd.ZstdDecompressor().decompress(data[match.start() :]))
        except zstd.ZstdError:
            continue
    return b"".join(opened)


def find_secrets(content: bytes, secrets: dict[str, str]) -> list[str]:
    """Names of the secrets of which a line is in some bytes, as it is or as JSON has it."""
    return [
        name
        for name, secret in secrets.items()
        if any(
            line.encode() in content for line in secret.splitlines() if line and "-----" not in line
        )
    ]


def find_kept(folder: Path, secrets: dict[str, str]) -> list[tuple[str, str]]:
    """Every file below a folder with a secret in it, in its name, or in its compressed parts."""
    kept = []
    for path in folder.rglob("*"):
        content = str(path.relative_to(folder)).encode()
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            content += data + open_frames(data)
        kept += [(path.name, name) for name in find_secrets(content, secrets)]
    return kept


def read_rings(run_id: str) -> bytes:
    """What the black boxes of a run hold, in one file or in several."""
    boxes = list(Path("/dev/shm").glob(f"quark-{run_id}-*"))
    files = [path for box in boxes for path in (box, *box.rglob("*")) if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


def read_everything(run: OpenRun) -> str:
    """All of a run's records and its stored state, as a reader gets them."""
    from quark_core.records.query import Query

    # What `repr` shows of a run is less than a reader gets.
    shown = [str(msgspec.to_builtins(run.reader.load_run(run.context.run_id)))]
    for kind in RECORD_TYPES:
        if kind != LifecycleRecord.KIND:
            records = run.read(kind, Query()).to_records()
            shown += [str(record.to_dict()) for record in records]
    return "\n".join(shown)


@pytest.fixture
def places(monkeypatch):
    """A secret of its own for each place."""
    names = """
        project name tags add_tag notes config argv event_payload event_status add_log log_payload
        handler handler_argument handler_extra handler_exception handler_cut metric_description
        metric_metadata batch_metadata batch_id batch_label artifact_metadata artifact_name
        artifact_file written_event written_metric error_message error_local
    """.split()
    shapes = iter(SHAPES.values())
    secrets = {name: next(shapes) for name in names}
    monkeypatch.setattr(sys, "argv", ["train.py", "--note", secrets["argv"], "-p", "S3cret!x"])
    return {**secrets, "short option": "S3cret!x"}


def log_everywhere(session, secrets):
    """Put each secret where a run takes a text."""
    events = quark.EventLogger(session)
    session.add_tag(f"tag {secrets['add_tag']}")
    returned = [
        events.log("saved", payload={"at": {"url": secrets["event_payload"]}}),
        events.log("saved", status=f"with {secrets['event_status']}"),
        session.add_log(f"using {secrets['add_log']}", payload={"x": secrets["log_payload"]}),
    ]
    handler = quark.LoggingHandler(session)
    logger = logging.getLogger("test_kept_nowhere")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    try:
        logger.error("at %s", secrets["handler_argument"], extra={"who": secrets["handler_extra"]})
        logger.error(f"login {secrets['handler']}")
        # The cut goes through the middle of it.
        before = 64 * 1024 - len(secrets["handler_cut"]) // 2
        logger.error("x " * (before // 2) + secrets["handler_cut"] + " more" * 10)
        try:
            raise ValueError(secrets["handler_exception"])
        except ValueError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    metrics = quark.MetricsLogger(session)
    described = {"description": secrets["metric_description"]}
    returned.append(metrics.log("loss", 1.0, step=1, **described))
    returned.append(metrics.log("acc", 1.0, step=1, metadata={"x": secrets["metric_metadata"]}))
    batches = quark.DataDiagnostics(session)
    returned.append(
        batches.log_batch(
            1.0,
            step=1,
            sample_ids=[secrets["batch_id"], "plain"],
            labels=[secrets["batch_label"], "password"],
            metadata={"source": secrets["batch_metadata"]},
        )
    )
    store = quark.ArtifactStore(session)
    returned += [
        store.log_snapshot(
            f"of-{secrets['artifact_name']}",
            {"a": 1},
            step=1,
            metadata={"x": secrets["artifact_metadata"]},
        ),
        store.store("note", f"{secrets['artifact_file']}/a.txt", "a text"),
    ]
    from quark_core.records import EventRecord, MetricRecord

    session.write(
        [
            EventRecord.make("imported", payload={"message": secrets["written_event"]}),
            MetricRecord.make("old/loss", 1.0, step=1, description=secrets["written_metric"]),
        ]
    )
    assert [find_secrets(str(record).encode(), secrets) for record in returned] == [
        [] for _ in returned
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("backends", ["", "csv", "tensorboard"])
def test_nothing_of_a_run_holds_a_secret(tmp_path, places, backends):
    with (
        pytest.raises(RuntimeError),
        quark.start_run(
            project=f"project {places['project']}",
            name=f"run {places['name']}",
            notes=f"notes {places['notes']}",
            tags=["plain", f"tag {places['tags']}"],
            config={"tracker": {"note": places["config"]}},
            storage_dir=tmp_path,
            backends=f"{backends}:{tmp_path / 'mirror'}" if backends else None,
        ) as session,
    ):
        run = session.open_run
        log_everywhere(session, places)
        ring = read_rings(session.run_id)
        session.flush()
        while_running = find_kept(tmp_path, places)
        shown = read_everything(run)
        state = find_secrets(str((session.state_dict(), session.to_dict())).encode(), places)
        hidden = places["error_local"]
        raise RuntimeError(f"{places['error_message']} {hidden}")

    assert find_secrets(ring, places) == []
    assert while_running == []
    assert find_secrets(shown.encode(), places) == []
    assert state == []
    assert find_kept(tmp_path, places) == []
    assert shown.count(REDACTED) >= len(places) - 4
    with quark.start_run(project="next", storage_dir=tmp_path) as after:
        events = quark.EventLogger(quark.open_run(session.run_id, storage_dir=tmp_path)).read()
        assert after.run_id != session.run_id
    assert {"runtime_error", "saved", "log_record", "imported"} <= {e.event_type for e in events}
    labels = {"password": 1}
    batch = quark.DataDiagnostics(quark.open_run(session.run_id, storage_dir=tmp_path)).read()[0]
    assert labels.items() <= batch.class_counts.items()


@pytest.mark.long
def test_the_whole_corpus_is_kept_nowhere(tmp_path, monkeypatch):
    """Each secret of the list, in its own form, where that form is taken."""
    secrets = {f"{place}: {planted.name}": planted.secret for place, planted in enumerate(CORPUS)}
    texts = [planted for planted in CORPUS if planted.form == "text"]
    values = [planted.content for planted in CORPUS if planted.form == "values"]
    commands = [planted.content for planted in CORPUS if planted.form == "argv"]
    monkeypatch.setattr(sys, "argv", [word for command in commands for word in (*command, "--x")])
    config = {f"part{index}": value for index, value in enumerate(values)}
    with quark.start_run(
        project="p", storage_dir=tmp_path, config=config, backends=f"csv:{tmp_path / 'out'}"
    ) as session:
        events = quark.EventLogger(session)
        for planted in texts:
            session.open_run.emit_event("text", "info", status=planted.content[:200])
            events.add_log(planted.content)
        for value in values:
            events.log("values", payload=value)
        for command in commands:
            events.log("command", payload={"argv": command})
        session.flush()
        shown = read_everything(session.open_run)
        running = find_kept(tmp_path, secrets)
    found = find_secrets(shown.encode(), secrets)

    assert len(secrets) >= 300
    assert found == []
    assert running == []
    assert find_kept(tmp_path, secrets) == []


KILLED = """
import os, signal, sys
import quark
secret = os.environ["SECRET_OF_THE_TEST"]
session = quark.start_run(project="p", storage_dir=sys.argv[1], config={"hf_key": secret})
print(session.run_id, flush=True)
events = quark.EventLogger(session)
events.log("said", payload={"message": "password=" + secret})
session.add_log("token=" + secret)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_what_a_killed_run_leaves_holds_no_secret(tmp_path):
    secret = "correcthorse" + "battery5"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SECRET_OF_THE_TEST": secret},
    )
    run_id = killed.stdout.strip()

    assert killed.returncode == -signal.SIGKILL
    assert find_kept(tmp_path, {"it": secret}) == []
    assert secret.encode() not in read_rings(run_id)
    with quark.start_run(project="next", storage_dir=tmp_path):
        pass
    assert find_kept(tmp_path, {"it": secret}) == []
