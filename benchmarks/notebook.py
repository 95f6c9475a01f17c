"""What a run that is shown live in a notebook costs the loop that trains, and what it sends.

Runs in a real kernel: one loop, whose view is looked at and not looked at in turns, so that what
else the machine does falls on both. The time in which the loop's thread could have run and had no
core (Linux tells it) is left out; that in which it waits for the interpreter's lock is not. Needs
`pip install --group notebook`.

    python benchmarks/notebook.py [--pairs N] [--window-s S]
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from typing import Any

from jupyter_client.manager import KernelManager

from quark.page.report import link_widget

# Metrics, seconds of work in a step, whether the session has a monitor.
_KINDS = ((3, 0.01, True), (3, 0.01, False), (3, 0.001, False), (40, 0.001, False))
_PATIENCE_S = 600.0

_CELL = """
import json, time
import numpy as np
import quark
from quark.page import live_view

def work(count, left=np.ones((64, 64))):
    for _ in range(count):
        left @ left
        sum(range(200))

def calibrate(step_s):
    began, done = time.thread_time(), 0
    while time.thread_time() - began < 0.5:
        work(10)
        done += 10
    return max(1, round(done * step_s / 0.5))

def read_clock():
    "Time without that in which this thread has waited for a core."
    try:
        with open("/proc/thread-self/schedstat") as file:
            return time.perf_counter() - int(file.read().split()[1]) / 1e9
    except OSError:
        return time.perf_counter()

def measure(pairs, window_s, metrics_count, step_s, is_monitored):
    session = quark.start_run(project="bench", storage_dir=STORE)
    monitor = quark.monitor(session) if is_monitored else None
    metrics = quark.MetricsLogger(session)
    names = ["train/loss", *(f"train/m{place}" for place in range(metrics_count - 1))]
    count, step, paces, sent = calibrate(step_s), 0, [], [0, 0, 0.0]
    live_view.show_live(session)
    (view,) = live_view._views.values()
    for window in range(2 * pairs):
        # On and off, then off and on, so that neither is always the first.
        is_live = window % 4 in (0, 3)
        view._hear(None, {"from": "bench", "views": int(is_live)}, None)
        while view._rests.is_set() == is_live:
            work(1)
        before = (view.sent_bytes, view.sent_count, view.spent_s)
        first, began, start = step, time.perf_counter(), read_clock()
        while time.perf_counter() - began < window_s:
            work(count)
            metrics.log_many({name: 1 / (1 + step) for name in names}, step=step)
            step += 1
        paces.append((is_live, (step - first) / (read_clock() - start)))
        after = (view.sent_bytes, view.sent_count, view.spent_s)
        if is_live:
            sent = [whole + new - old for whole, new, old in zip(sent, after, before)]
    session.end_run()
    return paces, sent
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--window-s", type=float, default=2.5)
    options = parser.parse_args()
    module = link_widget().encode()
    print(f"the widget: {len(module):,} bytes, {len(gzip.compress(module)):,} compressed, once")
    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(kernel_name="python3")
        manager.start_kernel(cwd=folder)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            _run(client, f"STORE = {folder!r}\n{_CELL}")
            for kind in _KINDS:
                _measure(client, options, *kind)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def _measure(
    client: Any,
    options: argparse.Namespace,
    metrics_count: int,
    step_s: float,
    is_monitored: bool,
) -> None:
    """Windows with a view and without, in turns, of one kind of loop."""
    arguments = (options.pairs, options.window_s, metrics_count, step_s, is_monitored)
    call = f"measure{arguments}"
    paces, sent = json.loads(_run(client, f"print(json.dumps({call}))"))
    ratios = []
    for one, other in zip(paces[::2], paces[1::2], strict=True):
        both = dict([one, other])
        ratios.append(both[True] / both[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    looked_at_s = options.pairs * options.window_s
    bytes_s, parts_s, share = (each / looked_at_s for each in sent)
    print(
        f"{metrics_count} metrics, {step_s * 1e3:g} ms a step, health by "
        f"{'the monitor' if is_monitored else 'a process'}: {middle:.3f} of the pace without "
        f"(quartiles {low:.3f} to {high:.3f}); {bytes_s:,.0f} bytes and {parts_s:.2f} parts a "
        f"second; the thread takes {100 * share:.1f} % of a core",
        flush=True,
    )


def _run(client: Any, code: str) -> str:
    """Have code executed; what it has printed."""
    asked = client.execute(code)
    parts = []
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=_PATIENCE_S)
        if message["parent_header"].get("msg_id") != asked:
            continue
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            parts.append(content["text"])
        if message["msg_type"] == "error":
            raise RuntimeError("\n".join(content["traceback"]))
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return "".join(parts)
    raise TimeoutError("the kernel does not answer")


if __name__ == "__main__":
    main()
