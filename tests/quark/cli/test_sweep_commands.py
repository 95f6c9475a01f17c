"""The command of a trial: how its parameters get into it."""

import os

import pytest

import quark
from quark.cli.sweep_agent import build_command, check_command, check_placeholders
from quark_core.ranks.launches import detect_rank, find_launch, leave_launch

PARAMETERS = {"lr": 0.01, "layers": 2, "name": "a b", "amp": True, "shift": -0.5}


def test_parameters_are_appended_as_flags():
    assert build_command(["python", "train.py"], PARAMETERS) == [
        "python", "train.py", "--lr", "0.01", "--layers", "2", "--name", "a b", "--amp", "true",
        "--shift=-0.5",
    ]  # fmt: skip


def test_parameters_are_appended_as_assignments_or_not_at_all():
    given = {"lr": 0.01, "opt": "adam"}
    assert build_command(["x"], given, "assignments") == ["x", "lr=0.01", "opt=adam"]
    assert build_command(["x"], given, "none") == ["x"]


def test_placeholders_are_filled_in_and_nothing_is_appended():
    assert build_command(["x", "--rate={lr}", "{other}"], {"lr": 0.01, "n": 1}) == [
        "x", "--rate=0.01", "{other}",
    ]  # fmt: skip
    assert build_command(["x", "{parameters}"], {"lr": 0.01, "n": "é"}) == [
        "x", '{"lr": 0.01, "n": "é"}',
    ]  # fmt: skip
    # What is filled in is not looked at again.
    assert build_command(["x", "{a}"], {"a": "{b}", "b": 1}) == ["x", "{b}"]


@pytest.mark.parametrize("value", ["$(id)", "a; b", "`id`", "a\nb", "'", "a b", "&", "|x"])
def test_into_a_line_for_a_shell_only_plain_values_are_put(value):
    with pytest.raises(quark.SchemaValidationError, match="so a shell would interpret its value"):
        build_command(["bash", "-c", "train --name {name}"], {"name": value})
    assert build_command(["x", "{name}"], {"name": value}) == ["x", value]


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
def test_a_value_that_is_no_argument_is_refused(value):
    with pytest.raises(quark.SchemaValidationError, match="cannot be passed to a command"):
        build_command(["x"], {"name": value})


def test_braces_of_the_scripts_own_stay_and_a_typing_error_is_told():
    check_placeholders(["x", "{}", "${HOME}", "{print $1}", "{lr}", "{parameters}"], ["lr"])
    with pytest.raises(quark.SchemaValidationError, match="Did you mean"):
        check_placeholders(["x", "{laers}"], ["lr", "layers"])


def test_a_command_that_cannot_be_started_is_told_before_anything_is_claimed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    check_command(["python"])
    for command, said in (
        ([], "Pass the command to run for each trial after --"),
        (["no-such-program"], "no such program on the PATH"),
        ([str(script)], "To run a script"),
    ):
        with pytest.raises(quark.SchemaValidationError, match=said):
            check_command(command)


def test_what_an_agent_starts_is_no_rank_of_its_launch():
    ranks = {
        "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "1",
        "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
        "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    left = leave_launch({**os.environ, **ranks})
    assert detect_rank(left).world_size == 1
    assert find_launch(left) is None
    assert left["SLURM_JOB_ID"] == "7"
