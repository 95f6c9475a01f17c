"""A run in JupyterLab: a real server, a real kernel and a real browser, while a loop trains."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.long

DEADLINE_S = 120
START = """import quark, os, pathlib, time
session = quark.start_run(project="p", storage_dir="store", name="live <b>one</b>")
pathlib.Path("pid").write_text(str(os.getpid()))
session"""
TRAIN = """metrics, step = quark.MetricsLogger(session), globals().get("step", 0)
while not pathlib.Path("enough").exists():
    metrics.log_many({"train/loss": 2 * 0.999**step, "val/loss": 2.1 * 0.999**step}, step=step)
    step += 1
    time.sleep(0.005)"""
CELLS = (START, TRAIN, "1 / 0", "session.end_run(); None")
READY = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.content?.widgets?.length === CELLS
        && panel.sessionContext?.session?.kernel?.status === "idle";
}"""
RUN = """place => {
    const { content } = jupyterapp.shell.currentWidget;
    content.activeCellIndex = place;
    content.deselectAll();
    jupyterapp.commands.execute("notebook:run-cell");
}"""
READ = """() => {
    const chart = window.quark?.charts.find("train/loss");
    return chart?.lines[0]?.points ?? 0;
}"""


class Lab:
    """A server of JupyterLab, on a port of its own and with a token.

    Attributes:
        folder: Its notebooks.
    """

    def __init__(self, folder):
        self.folder = folder / "work"
        self.folder.mkdir()
        self._token = secrets.token_hex(16)
        places = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        environment = {**os.environ, **{f"JUPYTER_{name}": str(folder / name) for name in places}}
        environment |= {"IPYTHONDIR": str(folder / "ipython"), "HOME": str(folder)}
        for name in ("SETTINGS", "WORKSPACES"):
            environment[f"JUPYTERLAB_{name}_DIR"] = str(folder / name)
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": 0,
            "ServerApp.root_dir": self.folder,
            "IdentityProvider.token": self._token,
            "LabApp.expose_app_in_browser": True,
            "LabApp.news_url": "",
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *arguments],
            env=environment, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + DEADLINE_S
        runtime = folder / "RUNTIME_DIR"
        while not (found := [*runtime.glob("jpserver-*.json")]) or not found[0].stat().st_size:
            assert self._process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        self._url = json.loads(found[0].read_text())["url"]

    def make(self, name, cells):
        """A notebook in a folder of its own; where it is opened."""
        import nbformat

        folder = self.folder / name
        folder.mkdir()
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        made = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": kernel},
        )
        nbformat.write(made, folder / "a.ipynb")
        return f"{self._url}lab/tree/{name}/a.ipynb?reset&token={self._token}"

    def close(self):
        self._process.terminate()  # which ends its kernels
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._log.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab: pip install --group notebook")
    pytest.importorskip("anywidget", reason="needs anywidget: pip install --group notebook")
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


class Notebook:
    """A notebook in a tab."""

    def __init__(self, page, lab, name):
        self.page = page
        self.folder = lab.folder / name
        self.strangers, self.errors = [], []
        page.set_default_timeout(1000 * DEADLINE_S)
        page.on("request", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(lab.make(name, CELLS))
        page.wait_for_function(READY.replace("CELLS", str(len(CELLS))))

    def _note(self, request):
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:", "about:")):
            self.strangers.append(request.url)

    def run(self, place):
        self.page.evaluate(RUN, place)

    def execute(self, command, arguments=None):
        self.page.evaluate(
            "([command, given]) => jupyterapp.commands.execute(command, given ?? undefined)",
            [command, arguments],
        )

    def wait_for_points(self, count):
        self.page.wait_for_function(f"count => ({READ})() >= count", arg=count)
        return self.page.evaluate(READ)

    def wait_until_idle(self):
        self.page.wait_for_function(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
        )

    def wait_for(self, text, selector="body", nth=0):
        self.page.locator(selector, has_text=text).nth(nth).wait_for()

    @property
    def live(self):
        return self.page.locator(".live")


@pytest.fixture
def open_notebook(chromium, lab):
    pages = []

    def begin(name, **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 1000}, **options)
        pages.append(Notebook(context.new_page(), lab, name))
        return pages[-1]

    yield begin
    for notebook in pages:
        notebook.page.context.close()
        assert notebook.strangers == []
        # What the widget does wrong is an error of the page.
        assert [text for text in notebook.errors if "quark" in text.lower()] == []


def test_a_run_lives_in_its_cell_and_becomes_a_card(open_notebook):
    notebook = open_notebook("lives")
    page = notebook.page
    notebook.run(0)
    notebook.live.wait_for()
    assert page.locator(".live-name").inner_text() == "live <b>one</b>"
    notebook.run(1)
    # It changes while the cell that trains is busy.
    seen = notebook.wait_for_points(1)
    for _ in range(3):
        seen = notebook.wait_for_points(seen + 1)
    assert page.evaluate("window.quark.charts.describe().map(chart => chart.name)") == [
        "train/loss", "val/loss",
    ]  # fmt: skip
    assert "steps/s" in page.locator(".live-figures").inner_text()
    # As dark as what is around.
    assert notebook.live.get_attribute("data-theme") == "light"
    notebook.execute("apputils:change-theme", {"theme": "JupyterLab Dark"})
    page.locator(".live[data-theme=dark]").wait_for()
    # An interrupt ends the cell and not the run.
    notebook.execute("notebook:interrupt-kernel")
    notebook.wait_for("KeyboardInterrupt", ".jp-OutputArea-output")
    assert "running" in page.locator(".live-head").inner_text()
    # An exception in a cell as well.
    notebook.run(2)
    notebook.wait_for("ZeroDivisionError", ".jp-OutputArea-output")
    notebook.wait_until_idle()
    # The start cell again: another run is live in its place.
    first = page.locator(".live-id").inner_text()
    notebook.run(0)
    page.wait_for_function(
        """first => {
            const find = node => node.shadowRoot?.querySelector(".live-id")
                ?? [...node.children].map(find).find(Boolean);
            const found = find(document.body)?.innerText;
            return found && found !== first;
        }""",
        arg=first,
    )
    notebook.run(1)
    notebook.wait_for_points(3)
    (notebook.folder / "enough").touch()
    notebook.wait_until_idle()
    notebook.run(3)
    # What stays needs no kernel: a card, and the report in its frame.
    page.locator("summary", has_text="Report").first.click()
    notebook.live.wait_for(state="detached")
    frame = page.frame_locator("iframe[title='Quark report']").first
    frame.locator(".report-run").wait_for()
    assert page.locator("iframe[title='Quark report']").first.get_attribute("sandbox") == (
        "allow-scripts"
    )
    import quark

    runs = {each.run_id: each for each in quark.search_runs(storage_dir=notebook.folder / "store")}
    assert sorted(each.state for each in runs.values()) == ["completed", "failed"]
    events = quark.EventLogger(quark.open_run(first, notebook.folder / "store")).read()
    assert {"cell_interrupted", "cell_failed"} <= {event.event_type for event in events}


def test_a_cleared_output_ends_what_comes(open_notebook):
    notebook = open_notebook("cleared")
    notebook.run(0)
    notebook.live.wait_for()
    notebook.wait_until_idle()
    notebook.execute("notebook:clear-all-cell-outputs")
    notebook.live.wait_for(state="detached")
    notebook.page.evaluate(
        """code => {
            const { content, sessionContext } = jupyterapp.shell.currentWidget;
            sessionContext.session.kernel.requestExecute({ code });
        }""",
        "from quark.page import live_view\n"
        "(view,) = live_view._views.values()\n"
        "while not view._rests.is_set(): time.sleep(0.05)\n"
        "pathlib.Path('rests').touch()\n",
    )
    notebook.page.wait_for_timeout(100)
    deadline = time.monotonic() + DEADLINE_S
    while not (notebook.folder / "rests").exists():
        assert time.monotonic() < deadline
        notebook.page.wait_for_timeout(100)


def test_a_kernel_that_dies_leaves_its_last_state(open_notebook):
    notebook = open_notebook("dies")
    page = notebook.page
    notebook.run(0)
    notebook.live.wait_for()
    notebook.run(1)
    notebook.wait_for_points(3)
    page.locator("summary", has_text="train/loss").wait_for()
    points = page.evaluate(READ)
    os.kill(int((notebook.folder / "pid").read_text()), signal.SIGKILL)
    # What was drawn stays, and it is said that nobody adds to it.
    page.locator(".live-note", has_text="No message from the kernel").wait_for()
    assert page.evaluate(READ) >= points
    notebook.execute("docmanager:save")
    page.reload()
    # The widget is gone with its kernel; what it last said in words is in the file.
    page.locator("summary", has_text="train/loss").wait_for()
    page.locator("summary", has_text="train/loss").click()
    page.locator("figcaption", has_text="train/loss").wait_for()
