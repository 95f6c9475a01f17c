"""Whatever somebody calls things, it is text: nothing of it runs, nothing is asked for."""

import re
import warnings

import pytest
from browser_runs import HOSTILE, log_run, make_exploding, make_layers

import quark

# Reads as "loss_txt.exe" turned around, with marks that hide beside it.
TURNED = "a\u202eexe.txt\u2066b\u200bc\u200fd"
SPELLED = r"a\u202eexe.txt\u2066b\u200bc\u200fd"
UNSEEN = re.compile("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
ALL_READ = """() => [document.title, document.body.innerText,
    ...[...document.querySelectorAll("*")].flatMap(element => ["title", "aria-label", "alt",
    "placeholder"].map(name => element.getAttribute(name) ?? ""))].join("\\n")"""

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


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    root = tmp_path_factory.mktemp("turned")

    def more(session):
        with quark.EventLogger(session) as events:
            events.log("odd.event", status=TURNED, payload={TURNED: TURNED})
        session.write(make_layers(TURNED, range(0, 100, 5), [1e-3] * 8 + [10.0] * 12))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # odd names are stored encoded
        values = {f"train/loss{TURNED}": make_exploding(60), "train/loss": [1.0, 2.0]}
        names = {"project": TURNED, "name": TURNED, "notes": TURNED}
        log_run(root, "turned", values, tags=[TURNED], config={TURNED: TURNED}, more=more, **names)
    return root


@pytest.mark.parametrize(
    "path",
    [
        "?column=tags&column=notes",
        pytest.param("run/turned"),
        pytest.param("run/turned?tab=events"),
        pytest.param("run/turned?tab=config"),
        pytest.param("run/turned/layers"),
    ],
)
def test_what_turns_or_hides_what_is_read_is_spelled_out(visit, serve_shared, turned, path):
    visitor = visit(serve_shared(turned), path)
    visitor.wait("said => document.body.innerText.includes(said)", SPELLED)
    visitor.wait_until_looked_at()
    read = visitor.evaluate(ALL_READ)
    assert read.count(SPELLED) > 1
    assert [line for line in read.split("\n") if UNSEEN.search(line)] == []


def test_a_report_spells_it_out_with_scripts_and_without(visit, tmp_path, turned):
    made = quark.report("turned", storage_dir=turned)
    assert not UNSEEN.search(str(made))
    static = re.sub(r"<(script|style)\b.*?</\1>", "", made.to_html(), flags=re.S)
    assert SPELLED in static
    assert not UNSEEN.search(static)
    assert not UNSEEN.search(quark.open_run("turned", storage_dir=turned)._repr_html_() or "")
