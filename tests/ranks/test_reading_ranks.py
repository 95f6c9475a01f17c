"""Series of one rank, statistics over all of them, and the table of who is late."""

import math
import statistics
from collections import defaultdict

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import quark
from quark.cli.main import cli
from quark.cli.rank_table import describe_late
from quark_core import composition
from quark_core.query import Query
from quark_core.rank_paces import RankPace, RankPaces, measure_paces
from quark_core.rank_statistics import compare_ranks
from quark_core.searching import summarize_run


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
    reader = composition.open_reader(storage_dir)
    return measure_paces(reader, summarize_run(reader, "ranked"))


def test_the_rank_that_is_late_is_found(uneven):
    paces = read_paces(uneven)
    assert [rank.rank for rank in paces.ranks] == [0, 1, 2]
    late = paces.find_late()
    assert (late.rank, late.step_ms, late.slowest) == (1, 14.1, 0.9)
    assert late.behind_ms == pytest.approx(4.0)
    assert (late.data_ms, late.last_step) == (5.0, 49)
    (line,) = describe_late(paces)
    assert line.startswith("Rank 1 is late: its steps take 4 ms (40 %) longer")
    assert line.endswith("It waits for its data.")


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
    reader = composition.open_reader(tmp_path)
    assert reader.read("ranked", "event", Query(any_of={"event_type": ("rank_joined",)})).count == 0


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
