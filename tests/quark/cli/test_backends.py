"""`quark backends` lists what is installed, and what was left out and why."""

import json

import pytest

BROKEN = 'raise ImportError("libnothing.so is missing")\n'
METADATA = "Metadata-Version: 2.1\nName: quark-broken\nVersion: 1.0\n"
ENTRY_POINTS = "[quark.backends]\nbroken = quark_broken_plugin\n"


@pytest.fixture
def broken_distribution(tmp_path):
    """A folder for PYTHONPATH that holds an installed plugin which cannot be imported."""
    folder = tmp_path / "site"
    info = folder / "quark_broken-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "quark_broken_plugin.py").write_text(BROKEN)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return str(folder)


def test_installed_backends_are_listed(invoke):
    result = invoke("backends")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    firsts = [words[0] for words in lines if words]
    assert firsts.index("csv") < firsts.index("embedded")
    can = " ".join(result.stdout.split("embedded")[-1].split())
    assert (
        "write, artifacts, belonging, changes, coordination, edits, generations, grid, groups"
        in can
    )
    assert "ignored" not in result.stdout


def test_json_lists_capabilities_and_origin(invoke):
    listed = json.loads(invoke("backends", "--json").stdout)
    by_name = {item["name"]: item for item in listed["backends"]}
    assert {"csv", "embedded"} <= by_name.keys()
    assert by_name["embedded"]["capabilities"] == [
        "artifacts",
        "belonging",
        "changes",
        "coordination",
        "edits",
        "generations",
        "grid",
        "groups",
        "idempotent",
        "pages",
        "primary",
        "read",
        "removal",
        "replay",
        "search",
        "series",
    ]
    assert by_name["csv"]["capabilities"] == ["artifacts", "groups", "idempotent", "read"]
    assert by_name["csv"]["origin"] == "quark-tracker"
    assert (by_name["csv"]["ranks"], by_name["csv"]["api_version"]) == ("session", 1)
    assert listed["left_out"] == []


@pytest.mark.long
def test_a_plugin_that_was_left_out_is_listed_with_its_reason(quark_command, broken_distribution):
    done = quark_command("backends", PYTHONPATH=broken_distribution, COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "ignored: broken of quark-broken: import failed: ImportError: libnothing.so is missing"
        in done.stdout
    )
    assert "embedded" in done.stdout


@pytest.mark.long
def test_json_has_what_was_left_out(quark_command, broken_distribution):
    done = quark_command("backends", "--json", PYTHONPATH=broken_distribution)
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert listed["left_out"] == [
        {
            "name": "broken",
            "origin": "quark-broken",
            "reason": "import failed: ImportError: libnothing.so is missing",
        }
    ]
    assert {"csv", "embedded"} <= {item["name"] for item in listed["backends"]}


@pytest.mark.long
def test_a_broken_plugin_does_not_stop_the_other_commands(
    quark_command, broken_distribution, tmp_path, log_run
):
    log_run(tmp_path, "run-a")
    done = quark_command("runs", "-d", tmp_path, "--json", PYTHONPATH=broken_distribution)
    assert done.returncode == 0
    assert [run["id"] for run in json.loads(done.stdout)] == ["run-a"]
