"""SLURM, Open MPI, PMI and hand-made launches, by their variables, with a process for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.programs import start_code
from launching import (
    PROGRAM,
    by_hand,
    clean_environment,
    older_openmpi,
    openmpi,
    pmi,
    read_lines,
    slurm,
)

import quark
from quark_core.ranks import launches as launch_claims
from quark_core.ranks.launches import Launch, RunClaims, find_launch
from quark_core.records.query import Query
from quark_core.runs import backend_choice
from quark_core.system.process import ProcessIdentity

# One by the plain names of its variables; the others are for the long tier.
LAUNCHERS = [
    slurm,
    *(
        pytest.param(launcher, marks=pytest.mark.long)
        for launcher in (openmpi, older_openmpi, pmi, by_hand)
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
def test_all_ranks_have_one_run(tmp_path, start_ranks, runs_of, launcher):
    ranks, _ = start_ranks(tmp_path, [launcher(rank) for rank in range(3)], "ranks=all")
    (run_id,) = {rank["run_id"] for rank in ranks}
    assert [rank["warnings"] for rank in ranks] == [[]] * 3
    assert runs_of(tmp_path) == {run_id: ("completed", 0, {(0, rank): 20 for rank in range(3)})}


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.__name__)
def test_a_second_launch_with_the_same_ids_is_a_new_run(tmp_path, start_ranks, runs_of, launcher):
    ids = set()
    for _ in range(2):
        ranks, _ = start_ranks(tmp_path, [launcher(rank, 2) for rank in range(2)], "ranks=all")
        ids |= {rank["run_id"] for rank in ranks}
    whole = ("completed", 0, {(0, 0): 20, (0, 1): 20})
    assert runs_of(tmp_path) == dict.fromkeys(ids, whole)
    assert len(ids) == 2


@pytest.mark.parametrize(
    "ends", ["dies=0", *(pytest.param(one, marks=pytest.mark.long) for one in ("dies=1", "none=1"))]
)
def test_a_requeued_job_goes_on_with_its_run(tmp_path, start_ranks, runs_of, ends):
    first, _ = start_ranks(tmp_path, [slurm(rank, 2) for rank in range(2)], "ranks=all", ends)
    again = [slurm(rank, 2, SLURM_RESTART_COUNT=1) for rank in range(2)]
    ranks, _ = start_ranks(tmp_path, again, "ranks=all")
    (run_id,) = {rank["run_id"] for rank in [*first, *ranks]}
    (found,) = runs_of(tmp_path).items()
    assert found[0] == run_id
    assert found[1][:2] == ("completed", 1)
    killed = {"dies=0": (11, 20), "dies=1": (20, 11), "none=1": (20, 20)}[ends]
    assert found[1][2] == {(0, 0): killed[0], (0, 1): killed[1], (1, 0): 20, (1, 1): 20}


@pytest.mark.long
def test_steps_of_one_job_are_runs_of_their_own(tmp_path, start_ranks, runs_of):
    for step in (0, 1):
        start_ranks(tmp_path, [slurm(rank, 2, SLURM_STEP_ID=step) for rank in (0, 1)])
    assert len(runs_of(tmp_path)) == 2


@pytest.mark.long
def test_without_a_shared_folder_an_exact_launch_still_agrees(tmp_path):
    """Each rank has a disk of its own, as on two nodes; what it cannot deliver waits in it."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path / str(rank)), "ranks=all"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(
                **slurm(rank, 2), QUARK_LAUNCH_TIMEOUT_SECONDS=0.5, QUARK_EXIT_TIMEOUT_SECONDS=10
            ),
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=280) for process in processes]
    ranks = read_lines("".join(output for output, _ in ended))
    assert ranks[0]["run_id"] == ranks[1]["run_id"]
    assert [rank["complete"] for rank in ranks] == [True, False]
    assert "is not in the store yet" in ended[1][1]
    journals = list((tmp_path / "1").glob(".quark/runs/*/journal/*/journal.json"))
    assert [json.loads(path.read_text())["awaits_run"] for path in journals] == [True]


@pytest.mark.long
def test_journals_of_another_disk_are_delivered_where_the_run_is(tmp_path, runs_of):
    test_without_a_shared_folder_an_exact_launch_still_agrees(tmp_path)
    quark = str(Path(sys.executable).with_name("quark"))
    waits = subprocess.run([quark, "sync", tmp_path / "1"], capture_output=True, text=True)
    assert waits.returncode == 1
    assert "is not in the store yet" in " ".join(waits.stdout.split())
    (path,) = (tmp_path / "1").glob(".quark/runs/*/journal/*/")
    target = tmp_path / "0" / path.relative_to(tmp_path / "1")
    target.parent.mkdir(parents=True)
    path.rename(target)
    subprocess.run([quark, "sync", tmp_path / "0"], check=True, capture_output=True)
    ((state, _, points),) = runs_of(tmp_path / "0").values()
    assert (state, points) == ("completed", {(0, 0): 20, (0, 1): 20})


RESUMED = """
import os, sys, quark
session = quark.resume_run(run_id=sys.argv[2], storage_dir=sys.argv[1], ranks=sys.argv[3])
with session, quark.MetricsLogger(session) as metrics:
    metrics.log("loss", 1.0, step=99)
    print(session.run_id, session.context.run.attempt, session.project_name)
"""


@pytest.mark.parametrize("ranks", [pytest.param("zero", marks=pytest.mark.long), "all"])
def test_all_ranks_may_resume_a_run(tmp_path, start_ranks, runs_of, ranks):
    start_ranks(tmp_path, [slurm(0, 1)], "dies=0")
    (run_id,) = runs_of(tmp_path)
    processes = [
        start_code(
            RESUMED,
            tmp_path,
            run_id,
            ranks,
            env=clean_environment(**slurm(rank, 2, SLURM_JOB_ID=99)),
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=280)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert said[0] == [run_id, "1", "ranks"]
    assert said[1][0] == run_id
    ((state, attempt, points),) = runs_of(tmp_path).values()
    assert (state, attempt) == ("completed", 1)
    wanted = {(1, 0): 1} if ranks == "zero" else {(1, 0): 1, (1, 1): 1}
    assert {place: n for place, n in points.items() if place[0] == 1} == wanted


@pytest.mark.long
def test_a_requeued_job_with_torchrun_in_it_goes_on_by_its_given_id(tmp_path, torchrun, runs_of):
    job = {"QUARK_RUN_ID": "job-7", "SLURM_JOB_ID": 7}
    for count in (0, 1):
        ranks, status = torchrun(
            tmp_path, "ranks=all", processes=2, SLURM_RESTART_COUNT=count, **job
        )
        assert status == 0
        assert {rank["run_id"] for rank in ranks} == {"job-7"}
    ((run_id, (state, attempt, points)),) = runs_of(tmp_path).items()
    assert (run_id, state, attempt) == ("job-7", "completed", 1)
    assert points == {(0, 0): 20, (0, 1): 20, (1, 0): 20, (1, 1): 20}


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
    # A rank that records dies, so that it has logged as many steps as are asked for below.
    kept = [0, 1] if ranks == "all" else [0]
    said, status = torchrun(
        tmp_path, f"ranks={ranks}", "sleep_ms=40", f"dies={kept[-1]}", f"checkpoint={how}",
        processes=2, max_restarts=1,
    )  # fmt: skip
    assert status == 0
    run_id, (state, attempt, points) = only(runs_of(tmp_path))
    assert (state, attempt) == ("completed", 1)
    assert {(rank["run_id"], rank["attempt"]) for rank in said if rank["restart"]} == {(run_id, 1)}
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


AGENT = "/tmp/torchelastic_x/none_y/attempt_{}/{}/error.json"


def torchrun(rank, restart=0, nodes=1, agent=AGENT, **others):
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_ERROR_FILE": agent.format(restart, rank),
        "GROUP_WORLD_SIZE": nodes,
        "RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        **others,
    }


def find(variables):
    return find_launch({name: str(value) for name, value in variables.items()})


@pytest.mark.parametrize(
    ("launcher", "source", "is_exact"),
    [
        (torchrun, "torchrun", True),
        (slurm, "slurm", True),
        (openmpi, "openmpi", True),
        (older_openmpi, "openmpi", True),
        (pmi, "pmi", False),
        (by_hand, "environment", False),
    ],
)
def test_ranks_of_a_launch_have_one_key(launcher, source, is_exact):
    found = [find(launcher(rank)) for rank in range(3)]
    assert len({launch.key for launch in found}) == 1
    assert {(launch.source, launch.is_exact, launch.restart) for launch in found} == {
        (source, is_exact, 0)
    }
    derived = {launch.derive_run_id("p") for launch in found}
    assert (None in derived) is not is_exact
    assert len(derived) == 1


def test_a_torchrun_agent_is_told_by_its_folder_and_keeps_its_key_at_a_restart():
    first, again = find(torchrun(0)), find(torchrun(0, restart=2))
    assert (again.key, again.restart) == (first.key, 2)
    other = find(torchrun(0, agent=AGENT.replace("none_y", "none_z")))
    assert other.key != first.key
    several = [find(torchrun(0, nodes=2, agent=f"/tmp/{n}/attempt_{{}}/{{}}/e")) for n in "ab"]
    assert several[0].key == several[1].key
    assert several[0].node_key != several[1].node_key
    assert not several[0].is_exact


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_JOB_ID": 1}, {"SLURM_STEP_ID": 1}, {"SLURM_CLUSTER_NAME": "d"}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_job_step_or_cluster_is_another_launch(changed):
    assert find(slurm(0)).key != find(slurm(0, **changed)).key


def test_a_process_without_a_launcher_is_of_no_launch():
    assert find({}) is None
    assert find({"RANK": "1"}) is None
    assert find({"SLURM_PROCID": "1"}) is None
    assert find({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}) is None


NAMES = [*torchrun(0), *slurm(0), *openmpi(0), *older_openmpi(0), *pmi(0), "WORLD_SIZE"]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=9) | st.integers(0, 9).map(str)))
def test_any_variables_give_a_launch_or_none(environ):
    launch = find_launch(environ)
    assert launch is None or (launch.restart >= 0 and len(launch.key) == 16)


EXACT = Launch("slurm", "k", 0, True)
VAGUE = Launch("environment", "v", 0, False)
GONE = ProcessIdentity("another-host", 1, "1")


@pytest.fixture
def claims(tmp_path, monkeypatch):
    """Makes the claims of one run, of as many processes as there are calls."""

    def make(launch, name="p"):
        monkeypatch.setattr(launch_claims, "_counts", launch_claims.Counter())
        return RunClaims(tmp_path, launch, name)

    return make


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessIdentity(launch_claims.current_process().host, child.pid, "1")
    child.wait()
    return identity


def age(claims, seconds, **changes):
    """Make a claim older, and say other things in it."""
    path = claims._path
    claim = msgspec.structs.replace(launch_claims._load(path), **changes)
    path.write_bytes(msgspec.json.encode(claim))
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def test_what_the_leader_claims_the_others_find(claims):
    assert claims(VAGUE).wait(0) is None
    assert claims(VAGUE).claim("run", 3)
    found = claims(VAGUE).wait(0)
    assert (found.run_id, found.attempt, found.ended) == ("run", 3, False)
    assert claims(VAGUE, "other").wait(0) is None
    assert claims(replace(VAGUE, restart=1)).wait(0) is None


@pytest.mark.parametrize("launch", [EXACT, VAGUE], ids=["exact", "vague"])
def test_an_older_claim_is_joined_only_where_its_leader_lives(claims, launch):
    claims(launch).claim("run", 0)
    age(claims(launch), 86400)
    assert claims(launch).wait(0).run_id == "run"  # its leader is this process
    age(claims(launch), 86400, ended=True)
    assert claims(launch).wait(0) is None
    age(claims(launch), 86400, ended=False, process=dead_process())
    assert claims(launch).wait(0) is None
    # Of another host nobody knows; then the launch itself must be sure.
    age(claims(launch), 86400, process=GONE)
    assert (claims(launch).wait(0) is not None) is launch.is_exact


def test_a_claim_of_another_host_that_is_a_little_older_is_taken_last(claims):
    claims(VAGUE).claim("run", 0)
    age(claims(VAGUE), launch_claims.find_age_s() + 20, process=GONE)
    assert claims(VAGUE)._look(is_last=False) is None
    assert claims(VAGUE).wait(0.05).run_id == "run"


def test_an_ended_run_is_joined_by_a_rank_that_was_there_before(claims):
    leader = claims(VAGUE)
    leader.claim("run", 0)
    leader.end()
    assert claims(VAGUE).wait(0).ended


def test_only_a_restart_takes_up_what_was_claimed(claims):
    leader = claims(EXACT)
    leader.claim("run", 0)
    leader.end()
    assert claims(EXACT).find_restarted() is None
    assert claims(EXACT).is_used
    assert claims(replace(EXACT, restart=1)).find_restarted().run_id == "run"


def test_a_restart_is_found_though_the_port_has_changed(claims):
    first = Launch("torchrun", "port-1", 0, False, "agent")
    claims(first).claim("run", 0)
    again = Launch("torchrun", "port-2", 1, False, "agent")
    assert claims(again).find_restarted().run_id == "run"
    # Another agent on this host, which met at the first one's port.
    other = Launch("torchrun", "port-1", 1, False, "agent-2")
    assert claims(other).find_restarted() is None


def test_of_two_leaders_one_is_first(claims):
    assert claims(EXACT).claim("one", 0, replaces=False)
    assert not claims(EXACT).claim("two", 0, replaces=False)
    assert claims(EXACT).wait(0).run_id == "one"


def test_the_second_run_of_a_process_is_another_one(tmp_path):
    first, second = (RunClaims(tmp_path, Launch("slurm", "twice", 0, True), "p") for _ in "ab")
    assert first.name != second.name
    assert first.derived_run_id != second.derived_run_id


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": 3}'])
def test_a_damaged_claim_is_none(claims, damage):
    claims(EXACT).claim("run", 0)
    claims(EXACT)._path.write_bytes(damage)
    assert claims(EXACT).wait(0) is None
    assert claims(EXACT).claim("again", 0)
    assert claims(EXACT).wait(0).run_id == "again"


def test_where_nothing_can_be_written_nothing_is_claimed_and_nothing_fails(tmp_path):
    (tmp_path / ".quark").touch()
    claims = RunClaims(tmp_path, EXACT, "p")
    assert claims.claim("run", 0)
    assert claims.wait(0.05) is None
    claims.end()


def test_without_hard_links_a_claim_is_made_all_the_same(claims, monkeypatch):
    def refuse(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert claims(EXACT).claim("one", 0, replaces=False)
    assert not claims(EXACT).claim("two", 0, replaces=False)
    assert claims(EXACT).wait(0).run_id == "one"


def test_old_claims_are_deleted(claims, tmp_path):
    claims(EXACT).claim("run", 0)
    age(claims(EXACT), 40 * 86400)
    claims(VAGUE).claim("new", 0)
    assert len(list((tmp_path / ".quark" / "launches").iterdir())) == 1


def test_a_reader_of_journals_sees_a_rank_that_came_before_the_run(tmp_path, monkeypatch):
    """On a network file system the journal of rank 1 may be there before that of rank 0."""
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    monkeypatch.setenv("QUARK_RUN_ID", "early")
    monkeypatch.setenv("WORLD_SIZE", "2")
    reader = None
    sessions = []
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        session = quark.start_run(project="p", storage_dir=tmp_path, ranks="all")
        sessions.append(session)
        metrics = quark.MetricsLogger(session)
        metrics.log("loss", float(rank), step=0)
        session.flush("durable")
        if reader is None:
            reader = backend_choice.open_reader(tmp_path)
            assert reader.list_runs() == []
    assert list(reader.read("early", "metric", Query())["rank"]) == [0, 1]
    for session in sessions:
        session.end_run()
