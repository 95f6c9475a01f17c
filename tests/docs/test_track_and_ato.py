"""The tables of what Track and Ato have: complete, and each row with a test that exists."""

import ast
import re
from functools import cache

import pytest
from blocks import DOCS, ROOT

PAGE = DOCS / "about" / "track-and-ato.md"
_TEST = re.compile(r"`(?P<path>tests/[\w/]+\.py)::(?P<name>test_\w+)`")
_DECISION = re.compile(r"\.\./decisions/(?P<file>\d{4}-[\w-]+\.md)")

# What users call in each, by its documents.
CALLS = {
    "Track": """set_project set_group set_group_metadata new_trial set_trial
    log_arguments get_arguments add_tags log_metadata log_metrics RingAggregator
    StatAggregator ValueAggregator
    TimeSeriesAggregator chrono set_eta_total show_eta capture_output log_code set_version
    get_file_version compute_version get_git_version log_file log_directory start finish set_status
    fetch_trials fetch_groups fetch_projects fetch_and_update_trial fetch_and_update_group report
    save register LogSignalHandler ORION_TRIAL_ID get_device""",
    "Ato": """get_structural_hash ADict auto freeze update_if_absent from_file dump
    get_minimal_config observe lazy MultiScope manual trace runtime_trace init_fn inspect_fn
    SQLLogger log_metric
    log_artifact get_runs_in_project find_best_run find_similar_runs find_similar_runs_by_trace
    get_trace_statistics HyperBand __num_halved__ DistributedHyperBand""",
}


def read_rows(system):
    """The rows of a system's table: feature, theirs, here, held by."""
    (section,) = re.findall(rf"^## {system}$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@cache
def list_tests(path):
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("system", CALLS)
def test_every_row_has_its_test_or_says_why_not(system):
    for row in read_rows(system):
        feature, _, here, held = row
        named = [(found["path"], found["name"]) for found in _TEST.finditer(held)]
        for path, name in named:
            assert (ROOT / path).is_file(), path
            assert name in list_tests(path), f"{path} has no {name}"
        if "declined" in here:
            decision = _DECISION.search(here)
            assert decision, feature
            assert (DOCS / "contributing" / "decisions" / decision["file"]).is_file()
        else:
            assert named, f"{feature}: no test"


@pytest.mark.parametrize("system", CALLS)
def test_every_call_of_theirs_is_in_the_table(system):
    theirs = " ".join(row[1] for row in read_rows(system))
    said = {name for code in re.findall(r"`([^`]+)`", theirs) for name in re.findall(r"\w+", code)}
    assert set(CALLS[system].split()) - said == set()
