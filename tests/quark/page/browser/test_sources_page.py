"""The code that a run was made of: its files, the text of one, and a diff of two runs."""

import pytest
from browser_runs import HOSTILE, log_run
from source_runs import keep_sources

from quark_core.artifacts.source_packs import ManifestEntry

OLD = "import model\n\nrate = 0.1\n"
NEW = f"import model\n\nrate = 0.2\n# {HOSTILE}\n"
ROWS = "[...document.querySelectorAll('.sources tbody tr')].map(row => row.innerText)"


@pytest.fixture(scope="session")
def coded(tmp_path_factory):
    """Two runs of one project."""
    root = tmp_path_factory.mktemp("coded")
    log_run(
        root,
        "old",
        name="old",
        analyzes=False,
        more=lambda session: keep_sources(
            session, {"train.py": OLD, "model.py": "x = 1\n"}, main="train.py"
        ),
    )
    odd = HOSTILE.replace(":", "").replace("\\", "").replace("//", "/")
    texts = {"train.py": NEW, "model.py": "x = 1\n", f"{odd}.py": "y = 1\n"}
    more = [ManifestEntry("large.py", "a" * 64, 2_000_000, reason=HOSTILE)]
    log_run(
        root,
        "new",
        name=HOSTILE,
        analyzes=False,
        more=lambda session: keep_sources(
            session,
            texts,
            more,
            main="train.py",
            changed=["model.py"],
            left_out={HOSTILE: HOSTILE},
            outside=[HOSTILE],
            root=HOSTILE,
        ),
    )
    log_run(root, "none", name="none", analyzes=False)
    return root


@pytest.mark.long
def test_the_files_of_a_run_and_the_text_of_one(visit, serve_shared, coded):
    visitor = visit(serve_shared(coded), "run/old")
    visitor.page.get_by_role("tab", name="Code").click()
    visitor.wait(f"{ROWS}.length === 2")
    model, train = visitor.evaluate(ROWS)
    assert model.startswith("model.py")
    assert "the main script" in train
    visitor.wait_for_text("2 files")
    visitor.page.get_by_role("button", name="train.py").click()
    visitor.wait(f"document.querySelector('.source-text pre')?.innerText === {OLD!r}")
    visitor.check_axe()
    visitor.page.get_by_role("button", name="Close").click()
    visitor.wait("!document.querySelector('.source-text')")
    visitor.page.get_by_label("path").fill("model")
    visitor.wait(f"{ROWS}.length === 1")


def test_code_of_others_is_text_and_runs_nowhere(visit, serve_shared, coded):
    visitor = visit(serve_shared(coded), "run/new?tab=code&source=%3Dtrain.py")
    visitor.wait(f"document.querySelector('.source-text pre')?.innerText === {NEW!r}")
    visitor.wait(f"{ROWS}.length === 4")
    visitor.wait_for_text("changed during the run")
    visitor.wait_for_text("Not kept")
    visitor.wait_for_text("Imported from elsewhere")
    count = (
        "document.querySelectorAll('#panel img, #panel script, #panel a[href^=javascript]').length"
    )
    assert visitor.evaluate(count) == 0
    assert visitor.evaluate("window.ran") is None


def test_a_run_without_code_says_why(visit, serve_shared, coded):
    visitor = visit(serve_shared(coded), "run/none?tab=code")
    visitor.wait_for_text("run none has no source snapshot")


def test_what_the_code_of_two_runs_differs_in(visit, serve_shared, coded):
    visitor = visit(serve_shared(coded), "compare?run=old&run=new&tab=code")
    visitor.wait("document.querySelectorAll('.file-diff').length === 3")
    visitor.wait_for_text("3 files differ, 1 are the same")
    visitor.page.locator(".file-diff summary", has_text="train.py").click()
    visitor.wait("document.querySelector('.file-diff .line-added')")
    lines = (
        "[...document.querySelectorAll('.line-added, .line-removed')]"
        ".map(line => line.innerText.trim())"
    )
    assert visitor.evaluate(lines) == ["-rate = 0.1", "+rate = 0.2", f"+# {HOSTILE}"]
    count = "document.querySelectorAll('#panel img, #panel script').length"
    assert visitor.evaluate(count) == 0
    assert visitor.evaluate("window.ran") is None
    visitor.check_axe()


def test_runs_of_which_one_has_no_code_say_so(visit, serve_shared, coded):
    visitor = visit(serve_shared(coded), "compare?run=old&run=none&tab=code")
    visitor.wait_for_text("run none has no source snapshot")
