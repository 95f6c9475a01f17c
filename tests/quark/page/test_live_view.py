"""A run in a notebook's cell, live: what a real kernel says to a browser while a loop trains."""

from itertools import pairwise

import pytest
from notebook_kernel import Kernel

import quark
from quark.page.pack import decode_pack

WIDGET = "application/vnd.jupyter.widget-view+json"
START = """
import quark, time, pathlib
session = quark.start_run(project="p", storage_dir="store", name="<img src=x>", config={"steps": 9})
ids = globals().get("ids", []) + [session.run_id]
session
"""
# Until a file is there, so that nothing depends on how quick the machine is.
TRAIN = """
metrics, step = quark.MetricsLogger(session), 0
while not pathlib.Path("enough").exists():
    metrics.log("train/loss", 1 / (1 + step), step=step)
    step += 1
    time.sleep(0.002)
print("steps", step)
"""
GONE = """
import threading
from quark.page import live_view
while {"quark-notebook", "quark-page-analysis"} & {each.name for each in threading.enumerate()}:
    time.sleep(0.05)
print(live_view._views)
"""


@pytest.fixture
def kernel(tmp_path):
    pytest.importorskip("anywidget", reason="needs anywidget: pip install --group notebook")
    made = Kernel(tmp_path)
    yield made
    made.close()


@pytest.fixture
def enough(tmp_path):
    """Lets the loop of a cell end."""
    return lambda: (tmp_path / "enough").touch()


def read_points(kernel):
    """What a browser knows of the loss by now: steps, and whether a part was missing."""
    steps, number = [], 0
    for part in kernel.list_parts():
        head, columns = decode_pack(part)
        assert head["whole"] or head["number"] == number + 1
        number = head["number"]
        if head["whole"]:
            steps = []
        if head["curves"]:
            steps.extend(columns["0.step"].tolist())
    return steps


def read_newest(kernel):
    """The newest step that a browser knows of."""
    heads = [decode_pack(part)[0] for part in kernel.list_parts()]
    return [head["run"]["newest_step"] for head in heads if "run" in head][-1]


@pytest.mark.long
def test_a_run_is_live_while_a_cell_trains_and_a_card_when_it_has_ended(kernel, enough, tmp_path):
    kernel.run(START)
    widget, still = kernel.read_displays()
    assert WIDGET in widget
    assert "&lt;img src=x&gt;" in still["text/html"]
    asked = kernel.begin(TRAIN)
    # Parts come while the cell is busy: three times there are more points than before.
    seen = [0]
    for _ in range(3):
        kernel.wait(lambda: len(set(read_points(kernel))) > seen[-1])
        seen.append(len(set(read_points(kernel))))
    assert not kernel.is_done(asked)
    enough()
    kernel.wait(lambda: kernel.is_done(asked))
    steps = int(kernel.read_output(asked).split()[-1])
    kernel.run("session.end_run(); None")
    card, emptied = kernel.wait(
        lambda: [
            shown for shown in [kernel.read_displays()] if "iframe" in shown[0].get("text/html", "")
        ]
    )[0]
    assert WIDGET not in card
    assert emptied["text/html"] == ""
    assert 'sandbox="allow-scripts"' in card["text/html"]
    assert "<svg" in card["text/html"]
    assert "<img" not in card["text/html"]
    kernel.wait(lambda: kernel.list("comm_close"))
    places = read_points(kernel)
    assert places == sorted(set(places))
    assert places[-1] <= steps - 1
    # Nothing of it is left: no thread, and no view.
    assert kernel.run(GONE).strip() == "{}"


@pytest.mark.long
def test_parts_are_small_and_come_once_a_second_at_most(kernel, enough):
    kernel.run(START)
    asked = kernel.begin(TRAIN)
    kernel.wait(lambda: len(kernel.list_parts()) >= 8)
    enough()
    kernel.wait(lambda: kernel.is_done(asked))
    heads = [(decode_pack(part)[0], len(part)) for part in kernel.list_parts()]
    # The first is there when the widget is; each later one is a second after the one before.
    times = [head["at"] for head, _ in heads[1:]]
    assert all(later - earlier >= 0.9 for earlier, later in pairwise(times))
    assert all(size < 3_000 for head, size in heads if not head["whole"])
    assert all(size < 20_000 for _, size in heads)


@pytest.mark.long
def test_the_start_cell_again_an_exception_and_an_interrupt(kernel, enough, tmp_path):
    kernel.run(START, cell="start")
    assert "ZeroDivisionError" in kernel.run("1 / 0", cell="bad")
    kernel.run(START, cell="start")
    asked = kernel.begin(TRAIN, cell="train")
    kernel.wait(lambda: len(read_points(kernel)) > 3)
    kernel.interrupt()
    kernel.wait(lambda: kernel.is_done(asked))
    assert "KeyboardInterrupt" in kernel.read_output(asked)
    # It goes on being live: what is logged after it comes too.
    before = max(read_points(kernel))
    kernel.run("metrics.log('train/loss', 0.5, step=10**6); None")
    kernel.wait(lambda: max(read_points(kernel)) > before)
    kernel.run(START, cell="start")
    ids = eval(kernel.run("print(ids)"))
    states = {each.run_id: each.state for each in quark.search_runs(storage_dir=tmp_path / "store")}
    assert [states[run_id] for run_id in ids] == ["failed", "interrupted", "running"]
    events = [
        [event.event_type for event in quark.EventLogger(opened).read()]
        for opened in (quark.open_run(run_id, tmp_path / "store") for run_id in ids[:2])
    ]
    assert "cell_failed" in events[0]
    assert "cell_interrupted" in events[1]
    # The views of both become cards, the third one is live.
    kernel.wait(
        lambda: (
            ["iframe" in each.get("text/html", "") for each in kernel.read_displays()][::2]
            == [True, True, False]
        )
    )
    assert WIDGET in kernel.read_displays()[4]


@pytest.mark.long
def test_a_browser_that_is_gone_costs_nothing_and_one_that_comes_back_is_told(kernel, enough):
    kernel.run(START)
    kernel.begin(TRAIN)
    kernel.wait(lambda: len(kernel.list_parts()) >= 3)
    enough()
    kernel.run("None")
    kernel.tell({"from": "tab", "views": 1})
    kernel.tell({"from": "tab", "views": 0})
    look = "from quark.page import live_view; (view,) = live_view._views.values()\n"
    assert kernel.run(look + "print(view._is_looked_at)").strip() == "False"
    kernel.run("import time\nwhile not view._rests.is_set(): time.sleep(0.05)")
    before = len(kernel.list_parts())
    kernel.run("metrics.log('train/loss', 0.5, step=10**6); session.flush()")
    kernel.run("print(view.sent_count)")
    assert len(kernel.list_parts()) == before
    kernel.tell({"from": "tab", "views": 1})
    kernel.wait(lambda: read_newest(kernel) == 10**6)


@pytest.mark.long
def test_a_connection_that_fails_is_told_once_and_the_training_goes_on(kernel):
    kernel.run(START)
    told = kernel.run(
        """
from quark.page import live_view
import logging
told = []
class Keeper(logging.Handler):
    def emit(self, record): told.append(record.getMessage())
logging.getLogger("quark").addHandler(Keeper())
(view,) = live_view._views.values()
def fail(*args, **kwargs): raise RuntimeError("the connection is gone")
view._widget.comm.publish_msg = fail
metrics = quark.MetricsLogger(session)
for step in range(2000):
    metrics.log("train/loss", 1.0, step=step)
while view.is_live: time.sleep(0.05)
view._thread.join()
print(len(told), "the connection is gone" in told[0])
print(session.end_run().status, len(quark.MetricsLogger(session).read()))
"""
    )
    assert told.splitlines()[-2:] == ["1 True", "completed 2000"]


@pytest.mark.long
def test_a_kernel_that_dies_leaves_the_last_state_in_words(kernel, tmp_path):
    kernel.run(START)
    kernel.begin(TRAIN)

    def read_still():
        html = kernel.read_displays()[1]["text/html"]
        return html if "train/loss" in html and "<svg" in html else None

    kernel.wait(read_still)
    kernel.kill()
    still = read_still()
    assert "running" in still
    assert "as of" in still
    (run,) = quark.search_runs(storage_dir=tmp_path / "store")
    assert run.state == "lost"
    # What is shown is no later than what is kept.
    assert run.newest_step >= 1


@pytest.mark.long
def test_without_anywidget_a_session_is_a_card_as_it_is_now(kernel):
    kernel.run("import sys; sys.modules['anywidget'] = None")
    kernel.run(START)
    (result,) = kernel.list("execute_result")
    assert set(result["content"]["data"]) == {"text/plain", "text/html"}
    assert not kernel.list("comm_open")


@pytest.mark.long
def test_a_run_of_another_process_is_live_too(kernel, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path / "store") as session:
        metrics = quark.MetricsLogger(session)
        metrics.log("train/loss", 1.0, step=1)
        session.flush()
        kernel.run(f"import quark\nquark.open_run({session.run_id!r}, 'store')")
        assert 1 in read_points(kernel)
        metrics.log("train/loss", 0.5, step=2)
        session.flush()
        kernel.wait(lambda: 2 in read_points(kernel))
    kernel.wait(lambda: "iframe" in kernel.read_displays()[0].get("text/html", ""))
    assert "completed" in kernel.read_displays()[0]["text/html"]
