"""A run that goes on while one page watches it: how late points are drawn, and what that costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil
from figures import Figure

from viewing.served import DRAWN, VIEW, Served, serve, wait_ms, watch

_RUN_ID = "liverun00000"
_METRICS = 20
# The page has read what was there before, and asks for what comes since.
_WARM_UP_S = 4.0
_LOOKS_MS = 25
_WRITER = """
import json, os, sys, time
import quark

folder, rate_hz, metrics, keeps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
session = quark.start_run(project="bench", storage_dir=folder)
logged = []
with quark.MetricsLogger(session) as logger:
    print("begun", flush=True)
    began = time.monotonic()
    step = 0
    while True:
        values = {f"train/metric{place}": 1 / (1 + step) for place in range(metrics)}
        logged.append(time.time())
        logger.log_many(values, step=step)
        step += 1
        time.sleep(max(0, began + step / rate_hz - time.monotonic()))
        if step % max(1, int(rate_hz)) == 0:
            with open(keeps + ".new", "w") as file:
                file.write(json.dumps(logged))
            os.replace(keeps + ".new", keeps)
"""
# What stands last in the first and in the last chart, looked at many times a second.
_WATCH = """([first, last, every_ms]) => {
  window.seen = [];
  let newest = -1;
  setInterval(() => {
    const ends = [first, last].map((name) => window.quark?.charts.find(name)?.lines[0]?.xs.at(-1));
    const step = Math.min(...ends.map((end) => end ?? -1));
    if (step > newest) {
      newest = step;
      window.seen.push([step, Date.now() / 1000]);
    }
  }, every_ms);
}"""


def measure_live(browser: Any, folder: Path, *, rate_hz: float, seconds: float) -> list[Figure]:
    """Lags from `log()` to the drawn chart, and the processor that the server takes meanwhile.

    Args:
        browser: A Chromium.
        folder: Where the run is made.
        rate_hz: Steps a second, of 20 metrics each.
        seconds: How long it is watched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keeps = folder / "logged.json"
    command = [sys.executable, "-c", _WRITER, str(folder), str(rate_hz), str(_METRICS), str(keeps)]
    writer = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "QUARK_RUN_ID": _RUN_ID}
    )
    assert writer.stdout is not None
    try:
        assert writer.stdout.readline() == "begun\n"
        # It has a first second of points before anybody looks.
        while not keeps.exists():
            time.sleep(0.05)
        with serve(folder) as served:
            seen, own, all_of_it = _watch(browser, served, seconds)
    finally:
        writer.terminate()
        writer.wait()
    lags = _find_lags(seen, json.loads(keeps.read_text()))
    cuts = quantiles(lags, n=20)
    rate = f"{rate_hz * _METRICS:,.0f} points/s"
    return [
        Figure(f"{rate}: lag to the drawn chart, p50, s", cuts[9]),
        Figure(f"{rate}: lag to the drawn chart, p95, s", cuts[18], at_most=1.5),
        Figure(f"{rate}: server, % of a core", 100 * own, at_most=2),
        Figure(f"{rate}: with the analyses that it has made, % of a core", 100 * all_of_it),
    ]


def _watch(
    browser: Any, served: Served, seconds: float
) -> tuple[list[tuple[int, float]], float, float]:
    """Steps with when they were drawn; shares of a core of the server, alone and with children."""
    context = browser.new_context(viewport=VIEW)
    context.add_cookies(served.cookies)
    page = context.new_page()
    watch(page, DRAWN, _METRICS)
    page.goto(f"{served.root}run/{_RUN_ID}")
    wait_ms(page)
    page.wait_for_timeout(1e3 * _WARM_UP_S)
    page.evaluate(_WATCH, ["train/metric0", f"train/metric{_METRICS - 1}", _LOOKS_MS])
    before, began = _read_cpu_s(served), time.monotonic()
    page.wait_for_timeout(1e3 * seconds)
    after, took_s = _read_cpu_s(served), time.monotonic() - began
    seen = page.evaluate("window.seen")
    context.close()
    own, all_of_it = ((late - early) / took_s for late, early in zip(after, before, strict=True))
    return [(int(step), at_s) for step, at_s in seen], own, all_of_it


def _read_cpu_s(served: Served) -> tuple[float, float]:
    process = psutil.Process(served.process.pid)
    times = process.cpu_times()
    own = times.user + times.system
    total = own + times.children_user + times.children_system
    for child in process.children(recursive=True):
        try:
            its = child.cpu_times()
            total += its.user + its.system
        except psutil.NoSuchProcess:
            continue
    return own, total


def _find_lags(seen: list[tuple[int, float]], logged: list[float]) -> list[float]:
    """Of each step that came while it was watched: from `log()` until it was drawn."""
    lags = []
    # What was drawn at the first look is of before.
    for (before, _), (step, at_s) in pairwise(seen):
        lags += [at_s - logged[each] for each in range(before + 1, step + 1) if each < len(logged)]
    return lags
