"""What a notebook shows of Quark's objects, and what its cells mean for runs."""

import re
import subprocess
import sys
import warnings

import pytest

import quark

HOSTILE = "<img src=x onerror=alert(1)>&\"'"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (HOSTILE, "plain"):
            session = quark.start_run(project="p", storage_dir=folder, name=name, tags=[HOSTILE])
            with quark.MetricsLogger(session) as metrics:
                for step in range(120):
                    exploded = name == HOSTILE and step >= 80
                    metrics.log("train/loss", 1e6 if exploded else 2 * 0.95**step, step=step)
                    metrics.log(HOSTILE, 1.0, step=step)
            session.end_run()
    return folder


@pytest.fixture(scope="module")
def found(store):
    return quark.search_runs(storage_dir=store, order_by="created")


@pytest.fixture(scope="module")
def session(store, found):
    return quark.open_run(found[0].run_id, store)


@pytest.fixture(scope="module")
def shown(store, found, session):
    """Objects by what they are."""
    other = quark.open_run(found[1].run_id, store)
    return {
        "session": session,
        "summary": found[0],
        "search": found,
        "analysis": quark.AnalyzerEngine(session).analyze(),
        "comparison": quark.ComparisonEngine(session).compare(other),
        "report": session.report(),
    }


NAMES = ("session", "summary", "search", "analysis", "comparison", "report")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_run_is_markup_in_a_card(shown, name):
    html = shown[name]._repr_html_()
    assert html is not None
    outside = re.sub(r'srcdoc="[^"]*"', "", html)
    assert "<img" not in outside
    assert "<script" not in outside
    assert "&lt;img" in outside


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_stays_short(shown, name):
    text = repr(shown[name])
    assert len(text) < 400
    assert text.isprintable()


def test_a_search_of_many_runs_stays_short(found):
    many = type(found)(list(found) * 500)
    assert len(repr(many)) < 400
    assert "and 997 more" in repr(many)
    # Of so many no card has a report.
    assert "iframe" not in many._repr_html_()


@pytest.mark.parametrize("name", NAMES)
def test_the_report_is_in_a_frame_that_may_only_run_its_script(shown, name):
    html = shown[name]._repr_html_()
    assert len(html) < 1_100_000
    (frame,) = re.findall(r"<iframe\b[^>]*>", html)
    assert re.search(r'\ssandbox="allow-scripts"\s', frame)
    # Beside it stands what readers without scripts see.
    outside = html.replace(frame, "")
    assert "critical" in outside
    assert "<svg" in outside


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_has_what_a_notebook_and_a_terminal_show(shown, name):
    bundle = shown[name]._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == repr(shown[name])
    assert bundle["text/html"].startswith("<")


def test_the_runs_of_a_comparison_are_all_in_its_report(shown, found):
    html = shown["comparison"]._repr_html_()
    assert "Report of these 2 runs" in html
    assert {each.run_id for each in found} <= set(re.findall(r"[0-9a-f]{16}", html))


def test_a_result_of_runs_that_are_gone_is_a_card_without_a_report(tmp_path):
    import shutil

    root = tmp_path / "gone"
    with quark.start_run(project="p", storage_dir=root) as begun:
        quark.MetricsLogger(begun).log("train/loss", 1.0, step=0)
    (summary,) = quark.search_runs(storage_dir=root)
    assert "iframe" in summary._repr_html_()
    shutil.rmtree(root)
    html = summary._repr_html_()
    assert "train/loss" in html
    assert "iframe" not in html


def test_a_run_of_the_same_id_in_a_store_that_was_made_anew_is_not_reported(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setenv("QUARK_RUN_ID", "twice")
    found = []
    for _ in range(2):
        with quark.start_run(project="p", storage_dir=tmp_path) as begun:
            quark.MetricsLogger(begun).log("train/loss", 1.0, step=0)
        found += quark.search_runs(storage_dir=tmp_path)
        if len(found) == 1:
            shutil.rmtree(tmp_path / ".quark")
    assert "iframe" not in found[0]._repr_html_()
    assert "iframe" in found[1]._repr_html_()


def test_a_result_that_was_unpickled_is_a_card_without_a_report(shown):
    import pickle

    copied = pickle.loads(pickle.dumps(shown["comparison"]))
    assert "against" in copied._repr_html_()
    assert "iframe" not in copied._repr_html_()


def test_a_report_that_is_too_large_for_a_cell_is_offered(shown, monkeypatch):
    from quark.page import notebook

    monkeypatch.setattr(notebook, "_MOST_BYTES", 1000)
    html = shown["session"]._repr_html_()
    assert "iframe" not in html
    assert "quark.report(" in html
    monkeypatch.setattr(notebook, "_MOST_POINTS", 100)
    html = shown["summary"]._repr_html_()
    assert "iframe" not in html
    assert "quark.report(" in html


@pytest.mark.long
def test_the_report_of_a_large_run_stays_within_its_bound(tmp_path):
    import numpy as np

    noise = np.random.default_rng(0).normal(size=(1000, 200))
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step, row in enumerate(noise):
            metrics.log_many({f"m{place}": float(v) for place, v in enumerate(row)}, step=step)
    html = session._repr_html_()
    assert html.count("<iframe") == 1
    assert len(html) < 1_100_000


def test_nobody_makes_html_for_a_terminal(monkeypatch, shown):
    """IPython asks for bundles there too."""
    import sys
    from types import SimpleNamespace

    formatter = SimpleNamespace(active_types=["text/plain"])
    shell = SimpleNamespace(display_formatter=formatter)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert shown["session"]._repr_mimebundle_() is None
    with pytest.raises(NotImplementedError):
        shown["session"]._ipython_display_()


def test_without_the_plugin_of_the_page_an_object_is_plain_text(monkeypatch, shown):
    from quark_core.backends import registry
    from quark_core.sessions import session

    monkeypatch.setattr(registry, "_default", registry.BackendRegistry.discover([]))
    monkeypatch.setattr(session, "_found", {})
    assert shown["summary"]._repr_html_() is None
    with pytest.raises(quark.QuarkError, match="'page'"):
        shown["session"].report()


def test_what_cannot_be_painted_ends_no_cell(monkeypatch, shown):
    monkeypatch.setattr("quark.page.notebook.PAINTERS", {"RunSummary": lambda _: 1 / 0})
    assert shown["summary"]._repr_html_() is None


def test_a_search_is_the_tuple_that_it_always_was(found):
    assert isinstance(found, tuple)
    assert found == tuple(found)
    assert [each.run_id for each in found[:1]] == [found[0].run_id]
    assert "No run matches." in type(found)()._repr_html_()


def test_a_session_that_is_kept_nowhere_says_so(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        assert "nothing to report" in session._repr_html_()


# --- cells

_SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = 'session = quark.start_run(project="p", storage_dir=root)\\nids.append(session.run_id)'
for cell in (
    f"import quark; root = {sys.argv[1]!r}; ids = []",
    start, "1 / 0", start, start, start + "  # another cell",
    start.replace("session", "one") + "; " + start.replace("session", "two").replace("\\n", "; "),
    "print([(quark.open_run(each, root).status) for each in ids])",
    "open_run = quark.open_run(ids[0], root)",
    "events = quark.EventLogger(open_run).read()",
    "print([(e.event_type, e.severity) for e in events if 'cell' in e.event_type])",
    "print('ZeroDivisionError' in str([e.payload for e in events]))",
):
    shell.run_cell(cell, store_history=True)
"""


@pytest.mark.long
def test_cells_that_fail_are_told_and_a_start_that_is_run_again_ends_the_run_before(tmp_path):
    pytest.importorskip("IPython", reason="needs IPython: pip install --group notebook")
    ended = subprocess.run(
        [sys.executable, "-c", _SHELL, str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("[", "True", "False"))]
    assert lines == [
        # The first had a cell that failed; the second was begun anew; the third is another cell's.
        # The last cell has started two at once, and both go on.
        "['failed', 'completed', 'running', 'running', 'running', 'running']",
        "[('cell_failed', 'error')]",
        "True",
    ], ended.stdout + ended.stderr


@pytest.mark.long
def test_a_notebook_is_executed_and_converted(tmp_path, store):
    reason = "needs nbconvert and ipykernel: pip install --group notebook"
    nbformat = pytest.importorskip("nbformat", reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbconvert = pytest.importorskip("nbconvert", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    cells = [
        "import quark",
        f"found = quark.search_runs(storage_dir={str(store)!r}); found",
        f"session = quark.open_run(found[0].run_id, {str(store)!r}); session",
        "quark.AnalyzerEngine(session).analyze()",
        f"quark.ComparisonEngine(session).compare(quark.open_run(found[1].run_id, {str(store)!r}))",
        "session.report()",
        "print(session.report())",
    ]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for cell in notebook.cells[1:6]:
        (output,) = cell.outputs
        assert set(output["data"]) == {"text/plain", "text/html"}, cell.source
    assert notebook.cells[6].outputs[0]["text"].startswith("plain (")
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page.count('sandbox="allow-scripts"') == 5
    assert "<img src=x" not in page


def test_why_a_result_changed_is_told_whole_and_harmless(tmp_path):
    runs = []
    for value in ("plain", HOSTILE):
        with quark.start_run(project="p", storage_dir=tmp_path, config={"mode": value}) as session:
            metrics = quark.MetricsLogger(session)
            for step in range(20):
                metrics.log("val/loss", 0.5**step + len(value), step=step)
        runs.append(session.run_id)
    html = quark.explain_change(*runs, storage_dir=tmp_path)._repr_html_()
    assert "<td>config</td>" in html
    assert "Unknown" in html
    assert "<img" not in html
