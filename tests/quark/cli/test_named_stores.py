"""Where something was looked for is said wherever it was not found; names are found as ids are."""

import json

import pytest

import quark

ABSENT = [
    ("show", "zzz"),
    ("logs", "zzz"),
    ("follow", "zzz", "--once"),
    ("analyze", "zzz"),
    ("compare", "zzz", "zzz"),
    ("why", "zzz"),
    ("sources", "zzz"),
    ("samples", "zzz"),
    ("artifacts", "zzz"),
    ("export", "zzz", "--format", "csv"),
    ("report", "zzz", "--short"),
]
NOTHING = [
    ("runs", "-t", "zzz"),
    ("groups",),
    ("traces", "vision"),
    ("sweep", "show"),
    ("rm", "--list"),
    ("gc", "-y"),
    ("artifacts", "first-run"),
]


@pytest.fixture
def root(tmp_path, log_run):
    log_run(tmp_path, "first-run", name="diffusion-base", values={"loss": [1.0]})
    log_run(tmp_path, "second-run", name="diffusion-large", values={"loss": [1.0]})
    log_run(tmp_path, "third-run", name="vit", values={"loss": [1.0]})
    return tmp_path


@pytest.mark.sampled
@pytest.mark.parametrize("command", NOTHING, ids=" ".join)
def test_an_empty_answer_names_its_store(invoke, root, command):
    assert f"the store {root}" in invoke(*command, "-d", root).stdout


FOREIGN = [command for command in ABSENT if command[0] != "why"]  # which has no --backend


@pytest.mark.parametrize("command", [*FOREIGN, ("runs", "-t", "zzz")], ids=" ".join)
def test_a_backend_in_place_of_the_store_is_named_by_its_uri(invoke, tmp_path, start, command):
    backend = f"csv:{tmp_path / 'mirror'}"
    start(tmp_path, "mirrored", backends=[backend]).end_run()
    if command[0] == "runs":
        said = invoke(*command, "-d", tmp_path, "-b", backend).stdout
    else:
        with pytest.raises(quark.RunNotFoundError) as caught:
            invoke(*command, "-d", tmp_path, "-b", backend)
        said = str(caught.value)
    assert f"the store {backend}" in said


def test_the_beginning_of_a_name_is_enough_wherever_that_of_an_id_is(invoke, root):
    for command in (("show",), ("edit", "--notes", "seen"), ("report", "--short")):
        done = invoke(command[0], "vi", *command[1:], "-d", root, "--json")
        assert (done.exit_code, "third-run" in done.stdout or "vit" in done.stdout) == (0, True)
    compared = json.loads(invoke("compare", "diffusion-b", "vi", "-d", root, "--json").stdout)
    assert compared["primary"]["run_id"] == "third-run"
    assert compared["reference"]["run_id"] == "first-run"
    trashed = json.loads(invoke("rm", "diffusion-l", "-y", "-d", root, "--json").stdout)
    assert [run["run_id"] for run in trashed["trashed"]] == ["second-run"]
    restored = json.loads(invoke("restore", "diffusion-l", "-d", root, "--json").stdout)
    assert restored == {"restored": ["second-run"]}


@pytest.mark.parametrize("command", [("show",), ("rm", "-y"), ("compare", "vit")])
def test_the_beginning_of_several_names_lists_them(invoke, root, command):
    with pytest.raises(quark.RunNotFoundError) as caught:
        invoke(*command, "diff", "-d", root)
    assert str(caught.value) == (
        '\'diff\' matches 2 runs: second-run "diffusion-large", first-run "diffusion-base". '
        "Pass a longer prefix."
    )


def test_a_name_or_an_id_in_full_goes_before_beginnings(invoke, root, log_run):
    log_run(root, "vi", name="vit-2")
    assert json.loads(invoke("show", "vi", "-d", root, "--json").stdout)["run"]["id"] == "vi"
    assert json.loads(invoke("show", "vit", "-d", root, "--json").stdout)["run"]["id"] == (
        "third-run"
    )
