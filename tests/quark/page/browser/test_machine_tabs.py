"""Tabs of a run: batches, ranks and the machine, timers, images by step, texts."""

import base64
import time

import pytest
from browser_runs import log_run
from machine_runs import log_machine

import quark

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def store_payloads(session):
    with quark.ArtifactStore(session) as artifacts:
        for step in (0, 10, 20):
            artifacts.store("image", "sample", PIXEL, step=step)
        artifacts.store("image", "confusion", PIXEL, step=10)
        artifacts.store("note", "words", "two words, and a <b> tag")
        artifacts.store("page", "odd", "<script>window.ran=1</script>")
        artifacts.store("table", "numbers", {"rows": [1, 2]})


def time_blocks(session):
    metrics = quark.MetricsLogger(session)
    for _ in range(3):
        with metrics.timer("forward"):
            time.sleep(0.01)
        with metrics.timer("data"):
            pass


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    root = tmp_path_factory.mktemp("machines")
    log_machine(root)
    log_run(root, "payloads", {"train/loss": [1.0, 0.5]}, more=store_payloads)
    log_run(root, "timed", {"train/loss": [1.0, 0.5]}, more=time_blocks)
    return root


@pytest.mark.long
def test_timers_are_a_table_what_took_the_most_first(visit, serve_shared, machines):
    visitor = visit(serve_shared(machines), "run/timed?tab=config")
    visitor.wait("document.querySelectorAll('#timers ~ .scrolls tbody tr').length === 2")
    rows = visitor.evaluate(
        "[...document.querySelectorAll('#timers ~ .scrolls tbody tr')].map(r => r.innerText)"
    )
    forward, data = (row.split("\t") for row in rows)
    assert (forward[0], forward[2], data[0], data[2]) == ("forward", "2", "data", "2")
    assert forward[1].endswith(" %")
    visitor.check_axe()


def test_ranks_batches_and_figures_of_the_machine_are_shown(visit, serve_shared, machines):
    visitor = visit(serve_shared(machines), "run/machine?tab=system")
    visitor.wait("document.querySelectorAll('.ranks tbody tr').length === 3")
    rows = visitor.evaluate(
        "[...document.querySelectorAll('.ranks tbody tr')].map(r => r.innerText)"
    )
    assert [row.split("\t")[0] for row in rows] == ["rank 1", "rank 2", "rank 0"]
    assert "silent" in rows[0]
    assert "slower" in rows[1]
    chart = visitor.wait_for_chart("step time, ms")
    assert [line["name"] for line in chart["lines"]] == ["rank 0", "rank 1", "rank 2"]
    visitor.check_axe()
    visitor.page.get_by_role("tab", name="Batches").click()
    visitor.wait("document.querySelector('.hard tbody tr')")
    first = visitor.evaluate("document.querySelector('.hard tbody tr').innerText").split("\t")
    assert (first[0], first[1], first[3]) == ("30", "50", "0, 130")
    visitor.wait("document.querySelectorAll('.classes tbody tr').length === 2")
    visitor.check_axe()


def test_images_share_a_slider_and_texts_are_text(visit, serve_shared, machines):
    visitor = visit(serve_shared(machines), "run/payloads?tab=artifacts")
    visitor.wait("document.querySelectorAll('.images img').length === 2")
    read = "[...document.querySelectorAll('.images figcaption')].map(each => each.innerText).sort()"
    assert visitor.evaluate(read) == ["confusion · step 10", "sample · step 20"]
    visitor.page.focus("#at")
    visitor.press("ArrowLeft")
    visitor.wait(f"() => {read}[1] === 'sample · step 10'")
    visitor.press("ArrowLeft")
    visitor.wait(f"() => {read}.join() === 'sample · step 0'")
    assert "at=0" in visitor.page.url
    visitor.page.get_by_text("Show words").click()
    visitor.wait("document.querySelector('.payload')?.innerText === 'two words, and a <b> tag'")
    assert visitor.evaluate("window.ran ?? null") is None
    tabs = visitor.evaluate(
        "[...document.querySelectorAll('[role=tab]')].map(tab => tab.innerText)"
    )
    assert tabs == ["Charts", "Events and logs", "Artifacts", "Code", "Config", "Delivery"]
    visitor.check_axe()
