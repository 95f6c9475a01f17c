"""Whatever somebody calls things, it is text: nothing of it runs, nothing is asked for."""

from browser_runs import HOSTILE

TABS = ("events", "artifacts", "config", "delivery")


def check_nothing_ran(visitor):
    assert visitor.evaluate("window.ran ?? null") is None
    assert (
        visitor.evaluate("document.querySelectorAll('[onerror], [onload], [onmouseover]').length")
        == 0
    )
    links = visitor.evaluate(
        """[...document.links].filter(link => link.origin !== location.origin)
        .map(link => link.protocol)"""
    )
    assert set(links) <= {"https:"}


def test_names_in_the_list_of_runs_are_text(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "?column=tags&column=notes")
    visitor.wait_for_text("onerror")
    visitor.wait_for_text("<b onmouseover=alert(1)>p</b>")
    check_nothing_ran(visitor)


def test_names_in_each_part_of_a_run_are_text(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/hostile")
    visitor.wait_for_chart(HOSTILE[:60])
    visitor.wait_for_chart("__proto__/constructor")
    visitor.wait("document.querySelectorAll('.finding').length > 0")
    check_nothing_ran(visitor)
    linked = []
    for tab in TABS:
        visitor.page.click(f"#tab-{tab}")
        visitor.wait(f"document.getElementById('tab-{tab}').ariaSelected === 'true'")
        if tab != "delivery":
            visitor.wait("document.getElementById('panel').innerText.includes('<img src=x')")
        visitor.page.evaluate(
            "document.querySelectorAll('details').forEach(one => one.open = true)"
        )
        check_nothing_ran(visitor)
        rels = visitor.evaluate(
            """[...document.links].filter(link => link.origin !== location.origin)
            .map(link => [link.rel.includes("noreferrer"),
            link.textContent === link.getAttribute("href")])"""
        )
        assert all(rel == [True, True] for rel in rels)
        linked += [tab] * bool(rels)
    assert linked == ["events", "config"]


def test_names_of_layers_in_the_map_are_text(visit, serve_shared, runs):
    visitor = visit(serve_shared(runs), "run/hostile/layers")
    visitor.wait("document.querySelector('main canvas')")
    visitor.wait("document.querySelector('main').innerText.includes('<img src=x')")
    check_nothing_ran(visitor)
