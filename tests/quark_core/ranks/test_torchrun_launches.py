"""torchrun with gloo processes: one run, the right ranks, no extra run anywhere."""

import json
import subprocess
import sys

import pytest
from launching import PROGRAM, clean_environment, read_lines

import quark


def only(runs):
    assert len(runs) == 1, runs
    return next(iter(runs.items()))


@pytest.mark.long
def test_by_default_rank_zero_keeps_and_all_know_the_run(tmp_path, torchrun, runs_of):
    ranks, status = torchrun(tmp_path, "gloo=1", "backends=csv")
    assert status == 0
    run_id, found = only(runs_of(tmp_path))
    assert found == ("completed", 0, {(0, 0): 20})
    assert [(rank["rank"], rank["run_id"]) for rank in ranks] == [(r, run_id) for r in range(4)]
    assert [rank["lanes"] for rank in ranks] == [["embedded", "csv"], [], [], []]
    assert [rank["warnings"] for rank in ranks] == [[]] * 4
    assert [path.name for path in (tmp_path / ".quark" / "runs").iterdir()] == [run_id]


@pytest.mark.long
def test_under_all_each_rank_keeps_its_own(tmp_path, torchrun, runs_of):
    ranks, status = torchrun(tmp_path, "gloo=1", "ranks=all", "backends=csv")
    assert status == 0
    run_id, found = only(runs_of(tmp_path))
    assert found == ("completed", 0, {(0, rank): 20 for rank in range(4)})
    assert {rank["run_id"] for rank in ranks} == {run_id}
    assert all(rank["complete"] and rank["lanes"] == ["embedded", "csv"] for rank in ranks)
    session = quark.open_run(run_id, tmp_path)
    events = quark.EventLogger(session).read(event_types=("run_started", "run_ended"))
    assert [event.rank for event in events] == [0, 0]
    joined = quark.EventLogger(session).read(event_type="rank_joined")
    assert [event.rank for event in joined] == [0, 1, 2, 3]
    assert {event.payload["world_size"] for event in joined} == {4}
    mirrored = quark.open_run(run_id, tmp_path, backend="csv")
    assert len(quark.MetricsLogger(mirrored).read(metric_key="loss")) == 80
    assert not list((tmp_path / ".quark" / "runs" / run_id).glob("journal/*"))


@pytest.mark.long
def test_a_list_of_ranks_is_led_by_the_lowest(tmp_path, torchrun, runs_of):
    ranks, status = torchrun(tmp_path, "ranks=1,3")
    assert status == 0
    run_id, found = only(runs_of(tmp_path))
    assert found == ("completed", 0, {(0, 1): 20, (0, 3): 20})
    assert {rank["run_id"] for rank in ranks} == {run_id}
    assert [rank["lanes"] for rank in ranks] == [[], ["embedded"], [], ["embedded"]]


@pytest.mark.parametrize(
    "ends",
    [*(pytest.param(one, marks=pytest.mark.long) for one in ("dies=2", "falls=0")), "dies=0"],
)
def test_a_restart_is_the_next_attempt_of_the_same_run(tmp_path, torchrun, runs_of, ends):
    ranks, status = torchrun(tmp_path, "ranks=all", "sleep_ms=20", ends, max_restarts=1)
    assert status == 0
    run_id, (state, attempt, points) = only(runs_of(tmp_path))
    assert (state, attempt) == ("completed", 1)
    assert {place: n for place, n in points.items() if place[0] == 1} == {
        (1, rank): 20 for rank in range(4)
    }
    # What the one that died had logged is there, the moment of its death included.
    assert points[0, int(ends[-1])] == 11
    again = [rank for rank in ranks if rank["restart"] == 1]
    assert [(rank["run_id"], rank["attempt"]) for rank in again] == [(run_id, 1)] * 4


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("start", "all"),
        pytest.param("plain", "all", marks=pytest.mark.long),
        pytest.param("resume", "all", marks=pytest.mark.long),
        pytest.param("start", "zero", marks=pytest.mark.long),
    ],
)
def test_a_restart_from_an_older_checkpoint_leaves_one_curve_on_each_rank(
    tmp_path, torchrun, runs_of, how, ranks
):
    said, status = torchrun(
        tmp_path, f"ranks={ranks}", "sleep_ms=40", "dies=1", f"checkpoint={how}",
        processes=2, max_restarts=1,
    )  # fmt: skip
    assert status == 0
    run_id, (state, attempt, points) = only(runs_of(tmp_path))
    assert (state, attempt) == ("completed", 1)
    assert {(rank["run_id"], rank["attempt"]) for rank in said if rank["restart"]} == {(run_id, 1)}
    kept = [0, 1] if ranks == "all" else [0]
    assert {place: n for place, n in points.items() if place[0] == 1} == {
        (1, rank): 12 for rank in kept
    }
    assert points[0, kept[-1]] > 8
    metrics = quark.MetricsLogger(quark.open_run(run_id, tmp_path))
    for rank in kept:
        rows = metrics.columns(metric_key="loss", rank=rank)
        assert rows["step"].tolist() == list(range(20))
        assert rows["attempt"].tolist() == [0] * 8 + [1] * 12
        curve = metrics.series("loss", rank=rank)
        assert curve.step.tolist() == list(range(20))


@pytest.mark.long
def test_a_restart_under_zero(tmp_path, torchrun, runs_of):
    ranks, status = torchrun(tmp_path, "sleep_ms=20", "dies=3", max_restarts=2)
    assert status == 0
    run_id, (state, attempt, points) = only(runs_of(tmp_path))
    assert (state, attempt, points[1, 0]) == ("completed", 1, 20)
    assert {rank["run_id"] for rank in ranks} == {run_id}


@pytest.mark.long
def test_a_given_run_id_survives_a_restart(tmp_path, torchrun, runs_of):
    _, status = torchrun(
        tmp_path, "ranks=all", "sleep_ms=20", "dies=1", max_restarts=1, QUARK_RUN_ID="given"
    )
    assert status == 0
    run_id, (state, attempt, points) = only(runs_of(tmp_path))
    assert (run_id, state, attempt) == ("given", "completed", 1)
    assert sum(n for (attempt, _), n in points.items() if attempt == 1) == 80


@pytest.mark.long
def test_a_second_launch_with_the_same_ports_is_a_new_run(tmp_path, torchrun, runs_of):
    first, _ = torchrun(tmp_path, "ranks=all")
    second, _ = torchrun(tmp_path, "ranks=all")
    ids = [{rank["run_id"] for rank in ranks} for ranks in (first, second)]
    assert len(ids[0]) == len(ids[1]) == 1
    assert ids[0] != ids[1]
    whole = ("completed", 0, {(0, rank): 20 for rank in range(4)})
    assert runs_of(tmp_path) == {run_id: whole for (run_id,) in ids}


@pytest.mark.long
def test_after_a_launch_that_died_the_same_ports_are_a_new_run(tmp_path, torchrun, runs_of):
    _, status = torchrun(tmp_path, "ranks=all", "dies=0", "sleep_ms=20")
    assert status != 0
    ranks, status = torchrun(tmp_path, "ranks=all")
    assert status == 0
    runs = runs_of(tmp_path)
    (run_id,) = {rank["run_id"] for rank in ranks}
    assert len(runs) == 2
    assert runs[run_id] == ("completed", 0, {(0, rank): 20 for rank in range(4)})


@pytest.mark.long
def test_several_runs_of_one_launch_are_told_apart(tmp_path, torchrun, runs_of):
    ranks, _ = torchrun(tmp_path, "ranks=all", "runs=2", processes=2)
    by_rank = [[line["run_id"] for line in ranks if line["rank"] == rank] for rank in (0, 1)]
    assert by_rank[0] == by_rank[1]
    assert len(set(by_rank[0])) == 2
    whole = ("completed", 0, {(0, 0): 20, (0, 1): 20})
    assert runs_of(tmp_path) == dict.fromkeys(by_rank[0], whole)


@pytest.mark.long
def test_two_agents_of_one_launch_agree(tmp_path, port, runs_of):
    """Two nodes in small: each agent knows the port and the id "none", and not the other."""
    for _ in range(2):  # the second time with the same port, after the first has ended
        agents = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--node-rank", str(node), "--nproc-per-node", "2", "--master-addr"),
                    *("127.0.0.1", "--master-port", str(port), str(PROGRAM), str(tmp_path)),
                    "ranks=all",
                ],
                stdout=subprocess.PIPE,
                text=True,
                env=clean_environment(),
            )
            for node in (0, 1)
        ]
        ranks = read_lines("".join(agent.communicate(timeout=280)[0] for agent in agents))
        assert [agent.returncode for agent in agents] == [0, 0]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
        assert len({rank["run_id"] for rank in ranks}) == 1
        assert [rank["warnings"] for rank in ranks] == [[]] * 4
    whole = ("completed", 0, {(0, rank): 20 for rank in range(4)})
    runs = runs_of(tmp_path)
    assert len(runs) == 2
    assert all(found == whole for found in runs.values())


@pytest.mark.long
def test_a_rank_that_comes_when_the_run_has_ended_still_belongs_to_it(tmp_path, torchrun, runs_of):
    ranks, _ = torchrun(tmp_path, "ranks=all", "late=1", processes=2)
    run_id, found = only(runs_of(tmp_path))
    assert found == ("completed", 0, {(0, 0): 20, (0, 1): 20})
    assert {rank["run_id"] for rank in ranks} == {run_id}


@pytest.mark.long
def test_where_the_journal_is_the_store_all_ranks_are_read(
    tmp_path, torchrun, monkeypatch, runs_of
):
    _, status = torchrun(tmp_path, "ranks=all", processes=3, QUARK_JOURNAL_ONLY="1")
    assert status == 0
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    _, found = only(runs_of(tmp_path))
    assert found == ("completed", 0, {(0, rank): 20 for rank in range(3)})


@pytest.mark.long
def test_claims_are_small_files_beside_the_store(tmp_path, torchrun):
    torchrun(tmp_path, "ranks=all", processes=2)
    (claim,) = (tmp_path / ".quark" / "launches").iterdir()
    assert json.loads(claim.read_text())["ended"] is True
    assert claim.stat().st_size < 1000
