"""`quark samples`: rows of text samples in the terminal."""

import json

import pytest

import quark

STEERING = "\x1b[2J\x1b]0;owned\x07[red]x"


@pytest.fixture
def rolled_out(tmp_path):
    session = quark.start_run(project="rl", storage_dir=tmp_path, name="policy")
    with session:
        samples = quark.SampleLogger(session, "rollouts")
        for step in range(10):
            samples.log(
                prompt=f"What is {step} + 1?",
                completion=f"It is {step + 1}.",
                reward=step / 10,
                step=step,
                task="sum" if step % 2 else "odd",
            )
        quark.SampleLogger(session, "hostile").log(prompt=STEERING, completion="b" * 5000, step=3)
    return session.run_id


def test_rows_are_searched_and_told_newest_first(tmp_path, rolled_out, invoke):
    place = ["--storage-dir", tmp_path]
    shown = invoke("samples", rolled_out, "--search", "IT IS 7", *place).output
    assert "What is 6 + 1?" in shown
    assert "1 sample." in shown
    shown = invoke(
        "samples", rolled_out, "-w", "reward >= 0.5", "-w", "task=sum", "--json", *place
    ).output
    assert [row["step"] for row in json.loads(shown)] == [9, 7, 5]
    shown = invoke(
        "samples", rolled_out, "--name", "rollouts", "--sort", "-reward", "-n", 2, "--json", *place
    ).output
    assert [row["reward"] for row in json.loads(shown)] == [0.9, 0.8]
    near = invoke("samples", rolled_out, "--near", 4, "-n", 3, "--json", *place).output
    assert sorted(row["step"] for row in json.loads(near)) == [3, 3, 4] or sorted(
        row["step"] for row in json.loads(near)
    ) == [3, 4, 5]
    assert invoke("samples", rolled_out, "--search", "nowhere", *place).output == (
        f"Run {rolled_out[:8]} of the store {tmp_path} has no matching text samples.\n"
    )


def test_what_a_model_says_does_not_steer_the_terminal(tmp_path, rolled_out, invoke):
    shown = invoke("samples", rolled_out, "--name", "hostile", "--storage-dir", tmp_path).output
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]x" in shown
    assert "4000 more characters; --full prints them" in shown
    whole = invoke(
        "samples", rolled_out, "--name", "hostile", "--full", "--storage-dir", tmp_path
    ).output
    assert whole.count("b") > 5000


def test_a_condition_that_is_none_is_shown(tmp_path, rolled_out, invoke):
    done = invoke("samples", rolled_out, "-w", "reward above 1", "--storage-dir", tmp_path)
    assert done.exit_code == 2
    assert "'reward above 1'" in done.stderr
    done = invoke("samples", rolled_out, "-w", "nosuch == 1", "--storage-dir", tmp_path)
    assert done.exit_code == 2
    assert "no sample has a column 'nosuch'" in done.stderr


def test_a_run_without_samples_says_so(tmp_path, log_run, invoke):
    log_run(tmp_path, "plain", values={"loss": [1.0]})
    shown = invoke("samples", "plain", "--storage-dir", tmp_path).output
    assert shown.endswith(f" of the store {tmp_path} has no text samples.\n")


def test_what_gets_done_is_told_by_show_and_follow(tmp_path, invoke):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session:
        telemetry = quark.SystemTelemetry(
            session, tokens_per_step=500, flops_per_token=2e9, peak_flops_per_s=1e14
        )
        for step in range(3):
            telemetry.record_step(step, step_time_ms=50.0)
    shown = invoke("show", session.run_id, "--storage-dir", tmp_path).output
    assert "throughput  10,000 tokens/s, 20 TFLOP/s, MFU 20.0 %" in shown
    followed = invoke("follow", session.run_id, "--once", "--storage-dir", tmp_path).output
    assert "tokens/s by a process" in followed
    assert "MFU 20 %" in followed
