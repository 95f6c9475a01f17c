"""What the page costs whoever looks: start, first paint, curves, zoom, list, maps, memory.

A real Chromium opens it (`QUARK_CHROMIUM`, or `chromium` on the path; with playwright of the
development tools). Without one only the server is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from storage.figures import Figure, print_figures
from storage.layers import _make_batches as make_layer_batches
from storage.run_list import _fill as fill_runs
from storage.stores import RUN_ID, BenchStore, make_losses, make_metric_batches, name_keys

from quark_backends.store.databases.sqlite import connect, ensure_store

_KEYS = 20
_REPORT_KEYS = 60
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
_DEADLINE_S = 60
_VIEW = {"width": 1600, "height": 5000}
_DRAWN = "() => (window.quark?.charts?.describe() ?? []).filter((c) => c.lines?.length).length"
_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
_FETCH = """async (path) => {
  const began = performance.now();
  const answer = await fetch(path);
  const bytes = (await answer.arrayBuffer()).byteLength;
  return [performance.now() - began, bytes, answer.status];
}"""


class Served:
    """`quark ui` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "quark", "ui", str(folder), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.link = re.findall(r"http://\S+", self.process.stdout.readline())[0]
        self.root = self.link.partition("?")[0]
        cookies = urllib.request.HTTPCookieProcessor()
        self.opener = urllib.request.build_opener(cookies)
        self.opener.open(self.link, timeout=_DEADLINE_S).read()
        self.ready_s = time.perf_counter() - began
        self.cookies = [
            {"name": each.name, "value": each.value or "", "url": self.root}
            for each in cookies.cookiejar
        ]

    @property
    def memory_mb(self) -> float:
        """Resident memory of the server now."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6

    def end(self) -> None:
        """Have it end, and wait for that."""
        self.process.terminate()
        self.process.communicate(timeout=_DEADLINE_S)


@contextmanager
def serve(folder: Path) -> Iterator[Served]:
    served = Served(folder)
    try:
        yield served
    finally:
        served.end()


def wait_ms(page: Any, expression: str, least: int) -> float:
    """Milliseconds from navigation on until a number has come."""
    end = time.monotonic() + _DEADLINE_S
    while page.evaluate(expression) < least:
        if time.monotonic() > end:
            raise TimeoutError(f"{expression} stays below {least}")
    return float(page.evaluate("() => performance.now()"))


def load(browser: Any, served: Served, path: str, expression: str, least: int) -> tuple[float, ...]:
    """First paint and the last thing that is waited for, in ms from navigation on."""
    context = browser.new_context(viewport=_VIEW)
    context.add_cookies(served.cookies)
    page = context.new_page()
    page.goto(served.root + path, wait_until="commit")
    done_ms = wait_ms(page, expression, least)
    paint_ms = page.evaluate(_PAINT) or done_ms
    context.close()
    return paint_ms, done_ms


def measure_curves(browser: Any, folder: Path, *, steps: int, loads: int) -> list[Figure]:
    store = BenchStore(folder)
    store.fill(make_metric_batches(make_losses(steps, _KEYS), rows=2_000), compacting=True)
    store.compact()
    store.close()
    with serve(folder) as served:
        figures = [Figure("quark ui is ready, s", served.ready_s, at_most=0.8)]
        if browser is not None:
            found = [load(browser, served, f"run/{RUN_ID}", _DRAWN, _KEYS) for _ in range(loads)]
            paints, charts = zip(*found, strict=True)
            figures.append(Figure("first paint, ms", median(paints), at_most=300))
            figures.append(Figure(f"all {_KEYS} charts, ms", median(charts), at_most=500))
        keys = "&".join(f"key={key}" for key in name_keys(_KEYS))
        for low, high in ((steps // 5, 2 * steps // 5), (steps // 5, steps // 5 + 20_000)):
            path = f"api/runs/{RUN_ID}/series?{keys}&low={low}&high={high}"
            times = [time_read(served, path) for _ in range(loads)]
            name = f"curves of {high - low:,} steps, ms"
            figures.append(Figure(name, median(times) * 1e3, at_most=150))
        figures.append(Figure("memory of the server, MB", served.memory_mb, at_most=250))
    return figures


def time_read(served: Served, path: str) -> float:
    began = time.perf_counter()
    served.opener.open(served.root + path, timeout=_DEADLINE_S).read()
    return time.perf_counter() - began


def measure_list(browser: Any, folder: Path, *, runs: int, loads: int) -> list[Figure]:
    connection = connect(ensure_store(folder))
    fill_runs(connection, runs)
    connection.close()
    with serve(folder) as served:
        time_read(served, "api/runs")
        times = [time_read(served, "api/runs?limit=100&column=val/metric7") for _ in range(loads)]
        figures = [Figure(f"a page of {runs:,} runs, ms", median(times) * 1e3, at_most=300)]
        if browser is not None:
            rows = "() => document.querySelectorAll('tbody tr').length"
            found = [load(browser, served, "", rows, 5)[1] for _ in range(loads)]
            figures.append(Figure("first rows in the browser, ms", median(found), at_most=300))
    return figures


def measure_metrics(browser: Any, folder: Path, *, count: int, loads: int) -> list[Figure]:
    store = BenchStore(folder)
    store.fill(make_metric_batches(make_losses(50, count), rows=count))
    store.compact()
    store.close()
    with serve(folder) as served:
        times = [time_read(served, f"api/runs/{RUN_ID}") for _ in range(loads)]
        figures = [Figure(f"a run of {count:,} metrics, ms", median(times) * 1e3)]
        if browser is not None:
            found = [load(browser, served, f"run/{RUN_ID}", _DRAWN, 4)[1] for _ in range(loads)]
            figures.append(Figure("its first charts, ms", median(found), at_most=500))
    return figures


def measure_map(folder: Path, *, layers: int, steps: int, loads: int) -> list[Figure]:
    store = BenchStore(folder)
    store.fill(make_layer_batches(layers, steps), compacting=True)
    store.compact()
    store.close()
    path = f"api/runs/{RUN_ID}/grid?kind=layer&field=norm&summary=activation"
    with serve(folder) as served:
        times = [time_read(served, path) for _ in range(loads)]
    name = f"map of {layers:,} layers over {steps:,} steps, ms"
    return [Figure(name, median(times) * 1e3, at_most=300)]


def measure_report(folder: Path, *, steps: int, loads: int) -> list[Figure]:
    """Of a run of as many curves and entries as a report has, whose analysis is stored."""
    import quark

    store = BenchStore(folder)
    store.fill(make_metric_batches(make_losses(steps, _REPORT_KEYS), rows=10_000))
    store.compact()
    store.close()
    quark.AnalyzerEngine(quark.open_run(RUN_ID, folder)).analyze(store=True)
    times, texts = [], []
    for _ in range(loads):
        began = time.perf_counter()
        texts.append(quark.report(RUN_ID, storage_dir=folder).to_html())
        times.append(time.perf_counter() - began)
    bare = quark.report(RUN_ID, storage_dir=folder, config=False, logs=False).to_html()
    data = bare.partition('"deflated":"')[2].partition('"')[0]
    return [
        Figure(
            f"a report of {_REPORT_KEYS} curves of {steps:,} points, s", median(times), at_most=1
        ),
        Figure("its size, kB", len(texts[-1]) / 1e3),
        Figure("its size without data, kB", (len(bare) - len(data)) / 1e3, at_most=350),
    ]


@contextmanager
def open_browser() -> Iterator[Any]:
    path = os.environ.get("QUARK_CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        print("There is no Chromium or no playwright: only the server is measured.")
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield browser
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What the page costs whoever looks.")
    parser.add_argument("--quick", action="store_true", help="fewer points and runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    steps, runs, layers, loads = (100_000, 1_000, 200, 3) if arguments.quick else (
        1_000_000, 10_000, 1_000, 7)  # fmt: skip
    if arguments.quick:
        print("This is the short form: the goals are meant for the full one.")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, open_browser() as browser:
        root = Path(name)
        for title, measure in (
            (
                f"{_KEYS} curves of {steps:,} points",
                lambda: measure_curves(browser, root / "curves", steps=steps, loads=loads),
            ),
            ("The list", lambda: measure_list(browser, root / "list", runs=runs, loads=loads)),
            (
                "Many metrics",
                lambda: measure_metrics(browser, root / "metrics", count=4_000, loads=loads),
            ),
            (
                "Layers",
                lambda: measure_map(root / "map", layers=layers, steps=layers, loads=loads),
            ),
            ("A report", lambda: measure_report(root / "report", steps=20_000, loads=loads)),
        ):
            figures |= print_figures(title, measure())
            # More than one or two means that others ran beside and the times are too long.
            print(f"\n(load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
