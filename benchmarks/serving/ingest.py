"""Rows that clients get into the service, beside what they get into an MLflow server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, print_figures

from serving.mlflow_server import MlflowServer
from serving.servers import Service, open_services
from serving.work import KEYS, ROWS

_GROUP = 16
_BENCHMARKS = Path(__file__).resolve().parents[1]


def measure_ingest(*, quick: bool) -> dict[str, float]:
    count, rounds = (64, 1) if quick else (800, 3)
    singles = 100 if quick else 1000
    figures: list[Figure] = []
    with ExitStack() as stack:
        services = [stack.enter_context(service) for service in open_services()]
        mlflow = MlflowServer.start_if_there(stack)
        taken: dict[str, list[float]] = {}
        calls: dict[str, list[float]] = {}
        for round_number in range(rounds):
            for service in services:
                for clients in (1, 4):
                    name = f"{service.name}, {clients} client{'s' * (clients > 1)}"
                    found = _send(service, f"{round_number}-{clients}", clients, count, _GROUP)
                    taken.setdefault(name, []).append(clients * count * ROWS / found["wall_s"])
                found = _send(service, f"{round_number}-single", 1, singles, 1)
                calls.setdefault(service.name, []).extend(found["calls_s"])
            if mlflow is not None:
                taken.setdefault("mlflow server", []).append(
                    mlflow.measure_log_batch(batches=5 if quick else 20)
                )
        rates = {name: median(found) for name, found in taken.items()}
        for name, rate in rates.items():
            goal = 300_000 if name.endswith("1 client") else None
            figures.append(Figure(f"{name}, rows/s", rate, at_least=goal))
        if "mlflow server" in rates:
            for service in services:
                ratio = rates[f"{service.name}, 1 client"] / rates["mlflow server"]
                figures.append(Figure(f"{service.name} / mlflow server", ratio, at_least=100))
        for name, found in calls.items():
            ordered = sorted(found)
            figures.append(Figure(f"{name}, a batch of 1,000 rows, p50 ms", 1e3 * median(ordered)))
            p99 = ordered[int(0.99 * (len(ordered) - 1))]
            figures.append(Figure(f"{name}, a batch of 1,000 rows, p99 ms", 1e3 * p99))
    return print_figures(
        f"Ingest over HTTP: batches of {ROWS:,} rows ({KEYS} metrics), {_GROUP} in a request, "
        f"{count} from each client, acknowledged after the commit",
        figures,
    )


def _send(service: Service, name: str, clients: int, count: int, group: int) -> dict[str, Any]:
    """Let clients send at the same time; the time from the word to the last one's end."""
    environment = {
        **os.environ,
        **service.environment,
        "PYTHONPATH": os.pathsep.join([str(_BENCHMARKS), str(_BENCHMARKS.parent)]),
    }
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "serving.client_process",
                f"{name}-{client}",
                str(count),
                str(group),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for client in range(clients)
    ]
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if line.strip() != "ready":
            raise RuntimeError(f"a client of {service.name} did not come up: {line!r}")
    begin = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    replies = [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    wall_s = max(reply["began_s"] + reply["taken_s"] for reply in replies) - begin
    return {"wall_s": wall_s, "calls_s": [s for reply in replies for s in reply["calls_s"]]}
