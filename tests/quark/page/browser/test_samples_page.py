"""Text samples in the browser: searched, sorted, opened, and found from a place in a chart."""

import pytest
from browser_runs import HOSTILE, log_run

import quark


def log_samples(session):
    samples = quark.SampleLogger(session, "rollouts")
    for step in range(100):
        samples.log(prompt=f"What is {step} + 1?", completion=f"It is {step + 1}. " + "x" * 400,
                    reward=step / 100, step=step, task="sum" if step % 2 else "odd")  # fmt: skip
    samples.log(prompt=HOSTILE, completion=HOSTILE, step=50, **{HOSTILE[:60]: HOSTILE})


@pytest.fixture(scope="session")
def sampled(tmp_path_factory):
    root = tmp_path_factory.mktemp("sampled")
    log_run(root, "rollouts", {"train/loss": [1 / (n + 1) for n in range(100)]}, more=log_samples)
    return root


def test_samples_are_searched_sorted_and_opened_beside_the_curves(visit, serve_shared, sampled):
    visitor = visit(serve_shared(sampled), "run/rollouts?tab=samples")
    visitor.wait("document.querySelectorAll('.samples tbody tr').length === 50")
    assert visitor.evaluate("window.ran ?? null") is None
    visitor.check_axe()
    visitor.page.get_by_role("button", name="Further").click()
    visitor.wait("document.querySelectorAll('.samples tbody tr').length === 50")
    visitor.page.fill("#where-sample", "reward >= 0.5 and task == sum")
    visitor.wait("document.querySelectorAll('.samples tbody tr').length === 25")
    visitor.page.fill("#find-sample", "it is 80.")
    visitor.wait("document.querySelectorAll('.samples tbody tr').length === 1")
    visitor.page.get_by_role("button", name="Open sample of step 79").click()
    visitor.wait("document.querySelectorAll('.whole-sample pre').length === 3")
    whole = visitor.evaluate("document.querySelector('.whole-sample').innerText")
    assert "x" * 400 in whole
    assert "train/loss" in whole
    visitor.check_axe()


def test_a_click_in_a_chart_shows_the_samples_of_that_step(visit, serve_shared, sampled):
    visitor = visit(serve_shared(sampled), "run/rollouts")
    visitor.wait_for_chart("train/loss")
    plot = visitor.page.locator(".chart-plot .u-over").first
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    visitor.wait("document.querySelectorAll('.near-samples tbody tr').length === 3")
    title = visitor.evaluate("document.querySelector('#near-title').innerText")
    step = int(title.rpartition(" ")[2])
    assert 40 <= step <= 60
    assert f"near={step}" in visitor.page.url
    assert visitor.evaluate("window.ran ?? null") is None
    visitor.check_axe()
    visitor.page.get_by_role("link", name="All samples").click()
    visitor.wait("document.querySelectorAll('#panel .samples tbody tr').length === 50")
