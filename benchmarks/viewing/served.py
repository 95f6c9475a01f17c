"""`quark ui` in a process of its own, and a browser that opens it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 60
# So high that 20 charts are in sight at once, and a screen as people have it.
VIEW = {"width": 1600, "height": 5000}
SCREEN = {"width": 1600, "height": 1000}
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
DRAWN = "() => (window.quark?.charts?.describe() ?? []).filter((c) => c.lines?.length).length"
_LOOK_AGAIN_MS = 50
# A new tab is itself some hundred ms in the making, in which a person has not yet typed an address.
_SETTLED_MS = 300
_WATCH = """(() => {
  const count = %s;
  const look = () => {
    let found = 0;
    try { found = count(); } catch {}
    if (found >= %d) window.quarkCame = performance.now();
    else setTimeout(look, 10);
  };
  look();
})()"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


class Served:
    """`quark ui` of one folder.

    Attributes:
        ready_s: From its start until it has answered.
        root: Its address.
        cookies: What a browser needs to be let in, in Playwright's form.
    """

    def __init__(self, folder: Path) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "quark", "ui", str(folder), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.link = re.findall(r"http://\S+", self.process.stdout.readline())[0]
        self.root = self.link.partition("?")[0]
        cookies = urllib.request.HTTPCookieProcessor()
        self.opener = urllib.request.build_opener(cookies)
        self.opener.open(self.link, timeout=DEADLINE_S).read()
        self.ready_s = time.perf_counter() - began
        self.cookies = [
            {"name": each.name, "value": each.value or "", "url": self.root}
            for each in cookies.cookiejar
        ]

    @property
    def memory_mb(self) -> float:
        """Resident memory of the server now."""
        return measure_memory_mb(self.process.pid)

    def end(self) -> None:
        """Have it end, and wait for that."""
        self.process.terminate()
        self.process.communicate(timeout=DEADLINE_S)


@contextmanager
def serve(folder: Path) -> Iterator[Served]:
    """A server of this folder while the block is left open."""
    served = Served(folder)
    try:
        yield served
    finally:
        served.end()


def measure_memory_mb(pid: int) -> float:
    """Resident memory of a process with its children now."""
    process = psutil.Process(pid)
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return float(total) / 1e6


def watch(page: Any, expression: str, least: int) -> None:
    """Have what the page opens next note by itself when a number has come.

    Asked for from outside, it would answer some hundred times a second in the thread that draws.
    """
    page.add_init_script(_WATCH % (expression, least))


def wait_ms(page: Any, deadline_s: float = DEADLINE_S) -> float:
    """Milliseconds from navigation on until what is watched for had come."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            found_ms = page.evaluate("() => window.quarkCame ?? null")
        except Exception:
            # A page that loads itself anew takes away what was asked.
            found_ms = None
        if found_ms is not None:
            return float(found_ms)
        if time.monotonic() > end:
            raise TimeoutError("what is watched for has not come")
        page.wait_for_timeout(_LOOK_AGAIN_MS)


def load(
    browser: Any,
    root: str,
    path: str,
    expression: str,
    least: int,
    *,
    cookies: list[dict[str, str]] | None = None,
    deadline_s: float = DEADLINE_S,
    viewport: dict[str, int] | None = None,
) -> tuple[float, float]:
    """First paint and the last thing that is waited for, in ms from navigation on."""
    context = browser.new_context(viewport=viewport or VIEW)
    try:
        if cookies:
            context.add_cookies(cookies)
        page = context.new_page()
        watch(page, expression, least)
        page.wait_for_timeout(_SETTLED_MS)
        page.goto(root + path, wait_until="commit")
        done_ms = wait_ms(page, deadline_s)
        return float(page.evaluate(PAINT) or done_ms), done_ms
    finally:
        context.close()


@contextmanager
def open_browser() -> Iterator[Any]:
    """A Chromium, or None where there is none."""
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
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()
