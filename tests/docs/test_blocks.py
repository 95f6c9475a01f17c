"""Every code block of the docs and the README is run, as a reader would run it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from blocks import ROOT, list_pages, parse_page, read_page
from page_runner import BlockError, compare, replace_names
from wide_bounds import STARTS, widen_in_children

RUN = {"python", "console", "sh"}
# Parsed below; configuration of other programs; what tests of their own read.
READ = {"json", "toml"}
LEFT = {"ini", "nginx", "js", "text", "yaml", "markdown"}
OWN_TESTS = {"where", "order", "mistake"}  # tests/quark_core/search
PAGE_TIMEOUT_S = 280
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def list_cases():
    """A case for each page that runs something."""
    for path in list_pages():
        page = read_page(path)
        if any(b.language in RUN and not b.not_run for b in page.blocks):
            marks = [pytest.mark.long] if page.is_long else []
            name = f"{page.name} long" if page.is_long else page.name
            yield pytest.param(page, id=name, marks=marks)


def clean_environment(home):
    """The environment of a reader who has set nothing yet."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("QUARK_", "WANDB_", "MLFLOW_", "SLURM_", "PYTEST_", "COVERAGE_"))
    }
    # A page's service may be as slow as this machine is.
    wide = widen_in_children(STARTS)
    here = [str(ROOT), str(Path(__file__).parent)]
    # No terminal's width, so that a table is the same everywhere.
    return {
        **kept,
        **wide,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([*here, wide["PYTHONPATH"]]),
        "HOME": str(home),
        "COLUMNS": "160",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "2",
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.sampled
@needs_bash
@pytest.mark.parametrize("page", list(list_cases()))
def test_the_blocks_of_a_page_run_as_they_stand(page, tmp_path):
    missing = {need for need in page.needs if not is_installed(need)}
    if missing:
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    home = tmp_path / "home"
    home.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "page_runner", tmp_path / "pages", page.path],
        cwd=tmp_path,
        env=clean_environment(home),
        capture_output=True,
        text=True,
        timeout=PAGE_TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr


def is_installed(name):
    """Whether there is a module, or a program, of the name."""
    return importlib.util.find_spec(name) is not None or shutil.which(name) is not None


@needs_bash
@pytest.mark.parametrize("path", list_pages(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_blocks_say_what_they_are_and_are_well_formed(path):
    for block in read_page(path).blocks:
        where = f"{path}:{block.line}"
        assert block.language in RUN | READ | LEFT | OWN_TESTS, f"{where}: {block.language!r}"
        if block.language == "python":
            compile(block.text, where, "exec", dont_inherit=True)
        elif block.language == "sh":
            checked = subprocess.run(
                ["bash", "-n", "-c", block.text], capture_output=True, text=True
            )
            assert checked.returncode == 0, f"{where}: {checked.stderr}"
            installs = re.search(r"\bpip (install|download)\b", block.text)
            assert block.not_run or not installs, f"{where}: it would install into this environment"
        elif block.language == "console":
            assert block.text.startswith("$ "), f"{where}: a console block begins with $"
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        assert block.not_run is None or block.language in RUN | READ, f"{where}: nothing to run"


def test_a_page_is_read_with_what_its_comments_say():
    page = parse_page(
        ROOT / "README.md",
        "<!-- page: long, needs torch -->\n<!-- hidden\nx = 1\n-->\n\n"
        "<!-- not run: needs a cluster -->\n```python\nx\n```\n"
        "<!-- exit status 3 -->\n\n```console\n$ quark\n```\nText.\n```text\nit\n```\n",
    )
    assert page.is_long
    assert page.needs == ("torch",)
    assert [(b.language, b.line, b.hidden, b.not_run, b.status) for b in page.blocks] == [
        ("python", 3, True, None, 0),
        ("python", 8, False, "needs a cluster", 0),
        ("console", 13, False, None, 3),
        ("text", 17, False, None, 0),
    ]


def test_an_example_begins_anew_and_may_need_something():
    text = "<!-- example: needs torch -->\n<!-- hidden\nx = 1\n-->\n\n**Example**\n"
    text += "```python\nx\n```\n<!-- example -->\n```python\ny\n```\n"
    page = parse_page(ROOT / "README.md", text)
    assert [(b.text, b.begins, b.needs) for b in page.blocks] == [
        ("x = 1", True, ("torch",)),
        ("x", False, ()),
        ("y", True, ()),
    ]


def test_what_a_page_shows_must_be_printed_but_for_figures():
    compare("loss 0.31 falls, in 3.2 s", "the loss 0.29 falls", "here")
    with pytest.raises(BlockError, match="rises"):
        compare("loss rises", "loss falls", "here")


def test_a_block_that_nothing_ends_is_named_with_its_line():
    with pytest.raises(ValueError, match="line 3: nothing ends"):
        parse_page(ROOT / "README.md", "# Title\n\n```python\nx\n")


def test_placeholders_are_what_the_page_names():
    names = {"RUN": "a1b2", "REPLACE": {"/srv": "/tmp/x y"}, "DIR": 3}
    assert replace_names("quark show RUN -d DIR --RUN", names) == "quark show a1b2 -d DIR --RUN"
    assert replace_names("cp /srv RUN", names) == "cp /tmp/x y a1b2"
