"""The pages over a mirror: all parts are there, and what is not says why."""

import pytest
from everything_runs import log_everything
from page_client import log_plain_run


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    root = tmp_path_factory.mktemp("mirror")
    backends = f"csv:{root / 'csv'}"
    for seed in range(2):
        log_everything(root, f"whole-{seed}", lr=0.1 + seed, seed=seed, backends=backends)
    return root, backends, log_plain_run(root, backends=backends)


@pytest.mark.long
def test_each_part_of_a_mirrored_run_is_shown(visit, serve_shared, mirror):
    visitor = visit(serve_shared(mirror[0], mirror[1]), "run/whole-0")
    visitor.wait_for_chart("train/loss")
    visitor.page.get_by_role("tab", name="System and ranks").click()
    visitor.wait_for_chart("step time, ms")
    visitor.page.get_by_role("tab", name="Batches").click()
    visitor.wait("document.querySelector('.hard tbody tr')")
    visitor.page.get_by_role("tab", name="Artifacts").click()
    visitor.page.get_by_role("button", name="Show scores as a table").click()
    visitor.wait("document.querySelectorAll('.cells tbody tr').length > 20")
    visitor.page.get_by_role("tab", name="Delivery").click()
    visitor.wait_for_text("Its other backends and waiting records")
    assert visitor.evaluate("document.body.innerText.includes('resume line')") is False
    visitor.wait_until_looked_at()
    assert "csv does not store analyses" in visitor.evaluate("document.body.innerText")


def test_what_a_mirror_lacks_is_said_where_it_would_be(visit, serve_shared, mirror):
    visitor = visit(serve_shared(mirror[0], mirror[1]), f"run/{mirror[2]}")
    for tab in ("System and ranks", "Batches", "Artifacts"):
        visitor.page.get_by_role("tab", name=tab).click()
        visitor.wait(
            "document.getElementById('panel').innerText.includes('csv has no data of this')"
        )
    visitor.page.get_by_role("link", name="Layers").click()
    visitor.wait_for_text("csv has no data of this run")
    visitor.wait_for_text("This run has no records of layers")


def test_mirrored_runs_are_compared(visit, serve_shared, mirror):
    visitor = visit(serve_shared(mirror[0], mirror[1]), "compare?run=whole-0&run=whole-1")
    visitor.wait("document.querySelector('.verdicts tbody tr')")
    chart = visitor.wait_for_chart("val/loss")
    assert [line["name"] for line in chart["lines"]] == ["whole-0", "whole-1"]
    visitor.page.get_by_role("tab", name="Layers by change").click()
    visitor.wait("document.getElementById('panel').innerText.length > 20")
    visitor.page.get_by_role("tab", name="Scatter").click()
    visitor.wait("document.querySelectorAll('.scatter circle').length === 2")
    visitor.go("")
    visitor.wait("document.querySelectorAll('.runs tbody tr[data-run]').length === 3")


@pytest.mark.parametrize("part", ["batches", "system", "artifacts", "events"])
def test_a_part_that_could_not_be_read_is_asked_for_again(visit, serve_shared, mirror, part):
    visitor = visit(serve_shared(mirror[0], mirror[1]), may_be_lost=True).sign_in()
    refused = []

    def refuse(route):
        refused.append(route.request.url)
        if len(refused) > 1:
            return route.continue_()
        body = '{"error": {"status": 503, "message": "the mirror is busy; ask again in a moment"}}'
        return route.fulfill(status=503, body=body, content_type="application/json")

    visitor.page.route(f"**/api/runs/whole-0/{part}?*", refuse)
    visitor.page.route(f"**/api/runs/whole-0/{part}", refuse)
    visitor.go(f"run/whole-0?tab={part}")
    visitor.wait_for_text("the mirror is busy")
    visitor.wait("!document.body.innerText.includes('the mirror is busy')")
    visitor.wait("document.querySelector('#panel table, #panel .tile, #panel .events li')")
    assert len(refused) > 1
