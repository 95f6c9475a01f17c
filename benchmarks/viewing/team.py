"""From the click on "Log in" to the first page of a team's runs, on `quark serve --ui`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure

from quark_backends.service.server.config import ServiceConfig
from quark_backends.service.server.deployment import DEFAULT_WORKSPACE, Deployment
from quark_backends.service.server.keys import make_key
from viewing.served import DEADLINE_S, SCREEN, measure_memory_mb, wait_ms, watch

_SHOWN = "() => document.querySelectorAll('.runs tbody th a').length"
_ROWS = 10


def measure_login(
    browser: Any, folder: Path, *, fill: Callable[[Path], None], loads: int
) -> list[Figure]:
    """Log in again and again, each time in a browser that keeps nothing.

    Args:
        browser: A Chromium.
        folder: Where the service keeps everything.
        fill: Makes the runs of a storage root.
        loads: How often, besides the first time after the server's start.
    """
    folder.mkdir(parents=True)
    store = f"sqlite:///{folder}/service.db"
    deployment = Deployment(ServiceConfig(store_url=store))
    deployment.upgrade()
    deployment.add_workspace(DEFAULT_WORKSPACE)
    fill(deployment.find_root(DEFAULT_WORKSPACE))
    key, _ = make_key(
        deployment.control, workspace=DEFAULT_WORKSPACE, name="somebody", scopes=["read"]
    )
    deployment.close()
    command = [sys.executable, "-m", "quark", "serve", "--ui", "--store", store, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            found = re.search(r"page is on (http://\S+/):", process.stdout.readline())
        times_s = [_log_in(browser, found[1], key) for _ in range(loads + 1)]
        memory_mb = measure_memory_mb(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
    first_s, *others_s = times_s
    return [
        Figure("login to the first rows, first time, s", first_s),
        Figure("login to the first rows, s", median(others_s), at_most=0.5),
        Figure("memory of the server, MB", memory_mb),
    ]


def _log_in(browser: Any, root: str, key: str) -> float:
    context = browser.new_context(viewport=SCREEN)
    try:
        page = context.new_page()
        page.goto(root)
        page.fill("#key", key)
        watch(page, _SHOWN, _ROWS)
        page.click("main button", no_wait_after=True)
        # From the click on: what sends on from the form is part of the navigation.
        return wait_ms(page) / 1e3
    finally:
        context.close()
