"""Streams with a journal on any file operations, and what they leave behind."""

import quark
from quark_core.delivery.batch_log import BatchLog
from quark_core.delivery.delivery_state import Files
from quark_core.delivery.delivery_worker import Lane, RetryPolicy
from quark_core.delivery.journal import Journal, JournalReader
from quark_core.delivery.segments import Origin
from quark_core.delivery.sending import Quarantine
from quark_core.delivery.stream import RunStream
from quark_core.records import EventRecord, MetricRecord

SOON = RetryPolicy(first_s=0.001, cap_s=0.01, rest_s=0.01, paused_s=0.01)


def open_stream(
    directory,
    *backends,
    files=None,
    segment_bytes=16 * 1024 * 1024,
    log_bytes=64 * 1024 * 1024,
    window_bytes=8 * 1024 * 1024,
    **arguments,
):
    """A started stream with a journal and a lane for each backend, the first the primary."""
    origin = Origin("run0")
    journal = Journal(directory, origin, files=files or Files(), segment_bytes=segment_bytes)
    log = BatchLog(log_bytes, journal, window_bytes=window_bytes)
    lanes = [
        Lane(
            f"lane{index}",
            lambda backend=backend: backend,
            log.open_cursor(),
            Quarantine(None, "x"),
            primary=index == 0,
            idempotent=True,
            retry=SOON,
        )
        for index, backend in enumerate(backends)
    ]
    stream = RunStream(origin, log, lanes, **arguments)
    stream.start()
    return stream


def put_metric(stream, value, step=0, key="m"):
    channel, origin = stream.channel("metric"), stream.origin
    sequence = channel.take_sequence()
    head = (origin.run_id, origin.writer_id, 0, 0, sequence, 1)
    channel.append(MetricRecord(*head, key, None, key, float(value), step))


def put_event(stream, event_type="e", payload=None):
    channel, origin = stream.channel("event"), stream.origin
    head = (origin.run_id, origin.writer_id, 0, 0, channel.take_sequence(), 1)
    channel.append(EventRecord(*head, event_type, "info", payload=payload))


def stored_values(backend):
    """Values of the metrics that a scripted backend has, in order."""
    batches = [batch for batch in backend.stored if batch.kind == "metric"]
    return [record.value for batch in batches for record in batch.to_records()]


def journaled_values(directory):
    """Values of the metrics that a journal holds, in order."""
    batches = [batch for batch in JournalReader(directory).read() if batch.kind == "metric"]
    return [record.value for batch in batches for record in batch.to_records()]


def adds_up(lane):
    """Whether a lane's report accounts for every record."""
    gone = lane.dropped + lane.unknown + sum(lane.quarantined.values())
    return lane.submitted == lane.delivered + lane.waiting + gone


def is_journaled_or_delivered(session):
    """Flush to the journal; whether it says no, or every backend has it all anyway."""
    try:
        session.flush("journaled", timeout_s=0.3)
    except quark.SessionStoreError as error:
        return "Nothing is lost" in str(error)
    return session.report_delivery().complete
