"""The example notebook runs as it is, from the first cell to the last, in a kernel of its own."""

import shutil
from pathlib import Path

import pytest

import quark

EXAMPLE = Path(__file__).parents[2] / "examples" / "live_notebook.ipynb"
REASON = "needs nbclient, nbconvert, ipykernel and anywidget: pip install --group notebook"


@pytest.mark.long
def test_the_notebook_example_runs_and_what_it_leaves_needs_no_kernel(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason=REASON)
    nbclient = pytest.importorskip("nbclient", reason=REASON)
    nbconvert = pytest.importorskip("nbconvert", reason=REASON)
    for name in ("ipykernel", "anywidget"):
        pytest.importorskip(name, reason=REASON)
    path = shutil.copy(EXAMPLE, tmp_path)
    notebook = nbformat.read(path, 4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources=resources
    )
    client.execute()
    (run,) = quark.search_runs(storage_dir=tmp_path)
    assert (run.state, run.newest_step) == ("completed", 599)
    assert run.metrics["val/accuracy"].last > 0.8
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    # The live view has become a card, as all others are.
    assert all(set(each) == {"text/plain", "text/html"} for each in shown)
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    assert page.count('sandbox="allow-scripts"') == 3
    assert "train/loss" in page
