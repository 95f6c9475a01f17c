"""Series of one rank, statistics over all of them, and the table of who is late."""

import logging
import math
import statistics
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import quark
from quark.analysis import rank_performance
from quark.analysis.rank_performance import RankPace, RankPaces, measure_paces
from quark.cli.main import cli
from quark.cli.run_view import describe_late
from quark_core.ranks.statistics import compare_ranks
from quark_core.records.base import now_us
from quark_core.records.query import Query
from quark_core.runs import backend_choice
from quark_core.runs.run_search import summarize_run
from quark_core.sessions import session as session_module


@pytest.fixture
def session_of(tmp_path, monkeypatch):
    """Opens the run of this test on a rank; the leading one must come first and end last."""
    monkeypatch.setenv("QUARK_RUN_ID", "ranked")
    monkeypatch.setenv("WORLD_SIZE", "4")

    def open_rank(rank, **arguments):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return quark.start_run(project="p", storage_dir=tmp_path, ranks="all", **arguments)

    return open_rank


@pytest.fixture
def ranked(session_of, tmp_path):
    """A run of three ranks, with gaps and a value that is not finite."""
    sessions = [session_of(rank, backends="csv") for rank in range(3)]
    for rank, session in enumerate(sessions):
        metrics = quark.MetricsLogger(session)
        for step in range(10):
            if (rank, step) != (1, 4):
                metrics.log("loss", math.nan if (rank, step) == (2, 5) else rank + step, step=step)
        metrics.log("val/acc", float(rank), epoch=1)
        metrics.log("loss", 100.0 + rank, step=9)
    for session in reversed(sessions):
        session.end_run()
    return tmp_path


def open_metrics(storage_dir, **arguments):
    return quark.MetricsLogger(quark.open_run("ranked", storage_dir, **arguments))


@pytest.mark.sampled
@pytest.mark.parametrize("backend", [None, "csv"])
def test_one_rank_is_read_by_itself(ranked, backend):
    metrics = open_metrics(ranked, backend=backend)
    records = metrics.read(metric_key="loss", rank=1)
    assert [record.step for record in records] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 9]
    assert {record.rank for record in records} == {1}
    assert [r.value for r in metrics.read(metric_key="loss", rank=2, limit=2)] == [11.0, 102.0]
    assert list(metrics.columns(rank=0, metric_key="loss", step_max=1)["value"]) == [0.0, 1.0]
    assert metrics.read(rank=7) == ()
    # Without a rank nothing has changed: all of them, rank by rank.
    assert [r.rank for r in metrics.read(metric_key="loss", step=3)] == [0, 1, 2]
    with pytest.raises(quark.SchemaValidationError, match="rank"):
        metrics.read(rank=-1)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", [None, "csv"])
def test_a_limit_is_taken_of_the_rank_that_was_asked_for(ranked, backend, monkeypatch):
    metrics = open_metrics(ranked, backend=backend)
    asked = []
    reader = type(metrics._run.reader)
    read = reader.read

    def watch(self, run_id, kind, query):
        found = read(self, run_id, kind, query)
        asked.append((query.rank, query.limit, found.count))
        return found

    monkeypatch.setattr(reader, "read", watch)
    assert [r.value for r in metrics.read(metric_key="loss", rank=0, limit=2)] == [9.0, 100.0]
    assert asked == [(0, 2, 2)]
    parts = list(metrics.iterate(metric_key="loss", rank=2, step_max=1, rows=1))
    assert [part["value"].tolist() for part in parts] == [[2.0], [3.0]]


@pytest.mark.sampled
@pytest.mark.parametrize("backend", [None, "csv"])
def test_a_curve_never_strings_ranks_together(ranked, backend):
    metrics = open_metrics(ranked, backend=backend)
    across = metrics.series("loss")
    assert (across.ranks, across.exact) == ((0, 1, 2), False)
    assert across.step.tolist() == list(range(10))
    assert across.low.tolist()[:5] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert across.high.tolist()[:5] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert across.mean.tolist()[:5] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert across.count.tolist() == [3, 3, 3, 3, 2, 3, 3, 3, 3, 6]
    assert across.non_finite.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    few = metrics.series("loss", max_points=2)
    assert (few.step.tolist(), few.count.tolist()) == ([0, 5], [14, 18])
    one = metrics.series("loss", rank=1)
    assert (one.ranks, one.exact) == ((1,), True)
    assert one.step.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 9]
    assert one.last.tolist() == [1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 101.0]
    by_epoch = metrics.series("val/acc")
    assert (by_epoch.epoch.tolist(), by_epoch.mean.tolist()) == ([1], [1.0])
    run = quark.open_run("ranked", ranked, backend=backend)
    assert quark.series(run, "loss", rank=2, max_points=1).high.tolist() == [102.0]
    nothing = quark.series(run, "loss", rank=7)
    assert (len(nothing), nothing.ranks) == (0, ())
    with pytest.raises(quark.SchemaValidationError, match="rank"):
        metrics.series("loss", rank=-1)


@pytest.mark.long
def test_a_curve_across_ranks_goes_attempt_by_attempt(session_of, tmp_path, monkeypatch):
    sessions = [session_of(rank) for rank in range(2)]
    for rank, session in enumerate(sessions):
        quark.MetricsLogger(session).log_many({"loss": 1.0 + rank}, step=5)
    for session in reversed(sessions):
        session.end_run()
    monkeypatch.delenv("QUARK_RUN_ID")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    with quark.resume_run(run_id="ranked", storage_dir=tmp_path, reopen=True) as again:
        metrics = quark.MetricsLogger(again)
        metrics.log("loss", 9.0, step=2)
        curve = metrics.series("loss")
    assert (curve.step.tolist(), curve.mean.tolist()) == ([5, 2], [1.5, 9.0])
    assert curve.ranks == (0, 1)


@pytest.mark.parametrize("backend", [None, "csv"])
def test_statistics_over_ranks(ranked, backend):
    metrics = open_metrics(ranked, backend=backend)
    found = metrics.read_across_ranks("loss")
    assert isinstance(found, quark.RankStatistics)
    assert (found.key, found.by, found.ranks, len(found)) == ("loss", "step", (0, 1, 2), 10)
    assert list(found.at) == list(range(10))
    assert list(found.count) == [3, 3, 3, 3, 2, 2, 3, 3, 3, 3]
    assert list(found.non_finite) == [0] * 5 + [1] + [0] * 4
    assert (found.mean[3], found.low[3], found.high[3], found.spread[3]) == (4.0, 3.0, 5.0, 2.0)
    assert found.std[3] == pytest.approx(statistics.pstdev([3, 4, 5]))
    assert (found.low_rank[3], found.high_rank[3]) == (0, 2)
    assert found.mean[4] == 5.0
    assert found.mean[9] == 101.0  # the newest value of a rank at a step counts
    rows = list(found.to_dicts())
    assert rows[5]["step"] == 5
    assert rows[5]["high_rank"] == 1
    assert len(metrics.read_across_ranks("loss", step_min=3, step_max=5)) == 3


@pytest.mark.long
def test_epochs_names_and_what_is_not_there(ranked):
    metrics = open_metrics(ranked)
    by_epoch = metrics.read_across_ranks("val/acc", by="epoch")
    assert next(iter(by_epoch.to_dicts()))["mean"] == 1.0
    assert len(metrics.read_across_ranks("val/acc")) == 0
    nothing = metrics.read_across_ranks("absent")
    assert (len(nothing), nothing.ranks, list(nothing.to_dicts())) == (0, (), [])
    for arguments in ({"by": "rank"}, {"step_min": -1}):
        with pytest.raises(quark.SchemaValidationError, match=next(iter(arguments))):
            metrics.read_across_ranks("loss", **arguments)


def test_a_run_of_one_rank_has_statistics_too(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("loss", 2.0, step=0)
        found = metrics.read_across_ranks("loss")
    assert (found.mean[0], found.std[0], found.spread[0], found.count[0]) == (2.0, 0.0, 0.0, 1)


ROWS = st.lists(
    st.tuples(
        st.integers(-1, 5), st.integers(0, 4), st.floats() | st.sampled_from([1.7e308, -1.7e308])
    ),
    max_size=40,
)


@given(ROWS)
def test_statistics_of_any_rows(rows):
    columns = {
        "step": np.array([row[0] for row in rows], dtype=np.int64),
        "rank": np.array([row[1] for row in rows], dtype=np.int64),
        "value": np.array([row[2] for row in rows], dtype=np.float64),
    }
    wanted = defaultdict(dict)
    for step, rank, value in rows:
        if step >= 0:
            wanted[step][rank] = value
    with np.errstate(all="raise", under="ignore"):
        found = compare_ranks(columns, "k", "step")
    assert list(found.at) == sorted(wanted)
    for row in found.to_dicts():
        values = wanted[row["step"]]
        finite = {rank: value for rank, value in values.items() if math.isfinite(value)}
        assert (row["count"], row["non_finite"]) == (len(finite), len(values) - len(finite))
        if not finite:
            assert math.isnan(row["mean"])
            assert row["high_rank"] == row["low_rank"] == -1
            continue
        low, high = min(finite.values()), max(finite.values())
        assert (row["low"], row["high"], row["spread"]) == (low, high, high - low)
        assert low <= row["mean"] <= high
        assert finite[row["high_rank"]] == high
        assert finite[row["low_rank"]] == low


@pytest.fixture
def uneven(session_of, tmp_path):
    """Three ranks of which rank 1 takes 4 ms longer a step, for its data."""
    sessions = [session_of(rank) for rank in range(3)]
    for rank, session in enumerate(sessions):
        config = quark.SystemTelemetryConfig(capture_cpu=False, capture_gpu=False)
        with quark.SystemTelemetry(session, config=config) as telemetry:
            for step in range(50):
                late_ms = 4.0 if rank == 1 and step % 10 else 0.0
                telemetry.record_step(
                    step, step_time_ms=10.0 + late_ms + rank / 10, data_time_ms=1.0 + late_ms
                )
    for session in reversed(sessions):
        session.end_run()
    return tmp_path


def read_paces(storage_dir):
    reader = backend_choice.open_reader(storage_dir)
    return measure_paces(reader, summarize_run(reader, "ranked"))


@pytest.mark.long
def test_the_rank_that_is_late_is_found(uneven):
    paces = read_paces(uneven)
    assert [rank.rank for rank in paces.ranks] == [0, 1, 2]
    late = paces.find_late()
    assert (late.rank, late.step_ms, late.slowest) == (1, 14.1, 0.9)
    assert late.behind_ms == pytest.approx(4.0)
    assert (late.data_ms, late.last_step) == (5.0, 49)
    (line,) = describe_late(paces)
    assert line.startswith("Rank 1 is late: its steps take 4 ms (40 %) longer")
    assert line.endswith("It waits for data.")


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_is_printed_whole(uneven, columns):
    done = CliRunner().invoke(
        cli, ["show", "ranked", "--storage-dir", str(uneven)], env={"COLUMNS": str(columns)}
    )
    lines = done.stdout.splitlines()
    head = next(line for line in lines if "step ms" in line)
    assert head.split() == "rank step ms p90 behind slowest data ms records step seen".split()
    rows = lines[lines.index(head) + 2 :][:3]
    assert [row.split()[:6] for row in rows] == [
        ["0", "10", "10", "-2.15", "0", "%"],
        ["1", "14.1", "14.1", "+4", "90", "%"],
        ["2", "10.2", "10.2", "-1.85", "10", "%"],
    ]
    assert "Rank 1 is late" in done.stdout
    as_json = CliRunner().invoke(cli, ["show", "ranked", "--storage-dir", str(uneven), "--json"])
    assert '"behind_ms": 4' in as_json.stdout


def test_without_telemetry_the_times_of_metrics_say_it(session_of, tmp_path):
    sessions = [session_of(rank) for rank in range(2)]
    for rank, session in enumerate(sessions):
        metrics = quark.MetricsLogger(session)
        for index in range(20):
            second = index * (2 if rank else 1)
            moment = f"2026-01-01T00:00:{second:02d}.000000+00:00"
            metrics.log("loss", 1.0, step=index * 10, timestamp=moment)
    for session in reversed(sessions):
        session.end_run()
    paces = read_paces(tmp_path)
    assert not paces.is_timed
    assert [rank.step_ms for rank in paces.ranks] == [100.0, 200.0]
    assert paces.find_late().rank == 1


def test_a_run_of_one_rank_has_no_table(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_RUN_ID", "ranked")
    with quark.start_run(project="p", storage_dir=tmp_path, ranks="all") as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    assert read_paces(tmp_path) is None
    reader = backend_choice.open_reader(tmp_path)
    assert reader.read("ranked", "event", Query(any_of={"event_type": ("rank_joined",)})).count == 0


@pytest.fixture
def log_steps(session_of, monkeypatch):
    """Logs steps on each of some ranks, a step each 0.1 s; and ends them at one moment.

    Given for each rank: its first and its last step, how many seconds later than the first
    rank it began, and each which step it logs.
    """

    def log(*ranks):
        sessions = [session_of(rank) for rank in range(len(ranks))]
        start = datetime(2026, 1, 1, tzinfo=UTC)
        for session, (first, last, later_s, every) in zip(sessions, ranks, strict=True):
            metrics = quark.MetricsLogger(session)
            for step in range(first, last + 1, every):
                moment = start + timedelta(seconds=0.1 * step + later_s)
                metrics.log("loss", 1.0, step=step, timestamp=moment.isoformat())
        # However long each of them takes to end, here, they were heard of at the same time.
        moment_us = now_us()
        monkeypatch.setattr(session_module, "now_us", lambda: moment_us)
        for session in reversed(sessions):
            session.end_run()

    return log


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        # At the same pace, all heard of at the same moment.
        ([(0, 199, 0, 1), (0, 139, 6, 1)], "Rank 1 is 60 steps behind"),
        (
            [(0, 199, 0, 1), (0, 139, 6, 1), (0, 129, 7, 1)],
            "Ranks 1, 2 are 60 to 70 steps behind the rank that is at step 199.",
        ),
        # What it did in its last second is not in the store yet.
        ([(0, 199, 0, 1), (0, 189, 0, 1)], "No rank is late"),
        # It logs only every 50th step.
        ([(0, 199, 0, 1), (0, 150, 5, 50)], "No rank is late"),
        ([(0, 199, 0, 1), (0, 199, 0, 1)], "No rank is late"),
    ],
    ids=["one", "two", "on its way", "sparse", "none"],
)
def test_a_rank_that_is_steps_behind_at_the_same_pace_is_named(log_steps, tmp_path, ranks, line):
    log_steps(*ranks)
    assert [text[: len(line)] for text in describe_late(read_paces(tmp_path))] == [line]


@pytest.mark.long
def test_a_rank_that_is_further_behind_than_is_looked_at_is_named(log_steps, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_performance, "_MAX_STEPS", 50)
    monkeypatch.setattr(rank_performance, "_MIN_STEPS", 50)
    log_steps((0, 199, 0, 1), (0, 99, 0, 1), (0, -1, 0, 1))
    paces = read_paces(tmp_path)
    assert [rank.steps_behind for rank in paces.ranks] == [0, 50, None]
    assert describe_late(paces) == [
        "Rank 1 is at least 50 steps behind the rank that is at step 199."
    ]


@pytest.mark.long
def test_the_end_of_a_run_says_what_is_new_and_nothing_else(session_of, caplog, monkeypatch):
    monkeypatch.setenv("QUARK_WRITERS_TIMEOUT_SECONDS", "1")
    caplog.set_level(logging.INFO, logger="quark")
    leader, other = session_of(0), session_of(1)
    quark.MetricsLogger(other).log("loss", 1.0, step=0)
    # The other rank has the run open, so that its journal is looked at again and again.
    leader.end_run()
    other.end_run()
    told = [line for line in caplog.messages if "records delivered" in line]
    assert not [line for line in told if "0 records delivered" in line]


def make_pace(rank, step_ms, **others):
    seen = others.pop("last_seen", "2026-01-01T00:01:00.000000+00:00")
    return RankPace(
        rank=rank, host=None, records=1, last_step=5, last_seen=seen, step_ms=step_ms, **others
    )


def test_chance_is_not_called_late_and_silence_is_told():
    ranks = (
        make_pace(0, 10.0, behind_ms=-0.2, slowest=0.4),
        make_pace(1, 10.2, behind_ms=0.2, slowest=0.6, last_seen="2026-01-01T00:00:10+00:00"),
    )
    paces = RankPaces(ranks=ranks, first_step=0, is_timed=True)
    assert paces.find_late() is None
    assert describe_late(paces) == [
        "No rank is late (from step 0 on).",
        "Rank 1 was last seen 50 s before the latest rank, at step 5.",
    ]


def test_the_machine_is_read_once_a_node_unless_every_rank_is_asked(session_of):
    sessions = [session_of(rank) for rank in range(3)]
    found = []
    for session, every in zip(sessions, (False, False, True), strict=True):
        config = quark.SystemTelemetryConfig(capture_gpu=False, every_rank=every)
        telemetry = quark.SystemTelemetry(session, config=config)
        rank = session.open_run.origin.rank
        watched = telemetry._captures and telemetry._watch.processor
        found.append((rank, watched, telemetry._watch.node))
        record = telemetry.record_step(0, step_time_ms=1.0)
        assert record.step_time_ms == 1.0
        # Whoever asks for a sample gets one.
        assert telemetry.sample(step=1).process_rss_bytes > 0
    for session in reversed(sessions):
        session.end_run()
    assert found == [(0, True, False), (1, False, False), (2, True, True)]


@pytest.mark.parametrize(
    ("shares", "late"),
    [((0.5, 0.5), None), ((0.7, 0.3), None), ((0.8, 0.2), 0), ((0.6, 0.2, 0.2), 0)],
)
def test_one_of_two_ranks_is_late_only_if_it_is_the_slowest_more_often_than_by_chance(shares, late):
    ranks = [
        RankPace(
            rank=rank, host=None, records=20, last_step=60, last_seen="2026-01-01T00:00:00Z",
            step_ms=18.0 + 4.0 * (rank == 0), slowest=share, behind_ms=4.0 if rank == 0 else -4.0,
        )
        for rank, share in enumerate(shares)
    ]  # fmt: skip
    found = RankPaces(ranks=tuple(ranks), first_step=0, is_timed=True).find_late()
    assert (found and found.rank) == late
