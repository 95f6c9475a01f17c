"""SLURM, Open MPI, PMI and hand-made launches, by their variables, with a process for each rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
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
        subprocess.Popen(
            [sys.executable, "-c", RESUMED, str(tmp_path), run_id, ranks],
            stdout=subprocess.PIPE,
            text=True,
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
