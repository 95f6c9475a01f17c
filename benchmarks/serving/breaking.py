"""Servers that die, a network that lies, keys that are taken back: rows 2, 10 to 13 and 23."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from durability.points import environment

from quark_core.errors import BackendRejected
from quark_core.records.query import Query
from serving.servers import PostgresService, Service, open_services
from serving.tally import Tally
from serving.training import open_proxy, train
from serving.work import make_batches, open_backend

_MODES = (
    "refuse hang drip drip_body half_close reset garbage close redirect gzip_bomb endless"
    " never_reads 500 502 503 429 413"
).split()


def kill_server(*, quick: bool) -> list[Tally]:
    """SIGKILL to the server while batches come in."""
    tallies = []
    for opened in open_services():
        with opened as service, train(service) as training:
            training.run(1.0)
            kills = 2 if quick else 20
            for _ in range(kills):
                service.kill()
                training.run(0.3, "outage")
                service.start()
                training.run(0.7, "after")
            training.catch_up()
            tallies.append(training.finish(2, f"SIGKILL of the server, {service.name}", kills))
    return tallies


def kill_postgres(*, quick: bool) -> list[Tally]:
    """SIGKILL to PostgreSQL, all of its processes, while batches come in."""
    with PostgresService("PostgreSQL") as service, train(service) as training:
        training.run(1.0)
        kills = 2 if quick else 10
        for _ in range(kills):
            service.database.kill()
            training.run(0.5, "outage")
            service.database.start()
            training.run(1.0, "after")
        training.catch_up()
        return [training.finish(2, "SIGKILL of PostgreSQL", kills)]


def break_network(*, quick: bool) -> list[Tally]:
    """Every way in which a connection goes wrong, each for a while."""
    tallies = []
    with Service("SQLite") as service:
        for mode in ("hang", "500", "reset") if quick else _MODES:
            row = 23 if mode in ("hang", "drip", "refuse") else 10
            with open_proxy(service) as proxy, train(service, proxy.url) as training:
                training.run(1.0)
                before = proxy.counts[mode]
                proxy.set_mode(mode)
                training.run(2.0 if quick else 6.0, "outage")
                proxy.set_mode("pass")
                took_s = training.catch_up()
                struck = proxy.counts[mode] - before
                note = f"caught up after {took_s:.1f} s"
                tallies.append(training.finish(row, f"the server: {mode}", struck, note))
    return tallies


def lose_replies(*, quick: bool) -> list[Tally]:
    """The request is carried out, the reply never comes."""
    tallies = []
    for opened in open_services():
        with (
            opened as service,
            open_proxy(service) as proxy,
            train(service, proxy.url) as training,
        ):
            training.run(1.0)
            for _ in range(2 if quick else 12):
                proxy.set_mode("lose_reply")
                training.run(1.5, "outage")
                proxy.set_mode("pass")
                training.catch_up()
            lost = proxy.counts["lose_reply"]
            fault = f"reply lost after the commit, {service.name}"
            tallies.append(training.finish(11, fault, lost))
    return tallies


def send_other_bytes(*, quick: bool) -> list[Tally]:
    """Other content under the identity of a batch that is stored; and the same again."""
    tallies = []
    for opened in open_services():
        with opened as service, tempfile.TemporaryDirectory() as folder:
            count = 20 if quick else 200
            start, batches = make_batches("other-bytes", count)
            backend = _open(service, Path(folder), "other-bytes")
            backend.write(start)
            refused = 0
            for first, second in zip(batches[::2], batches[1::2], strict=True):
                backend.write(first)
                backend.write(first)
                try:
                    backend.write(msgspec.structs.replace(second, number=first.number))
                except BackendRejected:
                    refused += 1
            rows = backend.read("other-bytes", "metric", Query()).count
            backend.close()
        expected = sum(batch.count for batch in batches[::2])
        tallies.append(
            Tally(
                row=12,
                fault=f"other bytes under a number, {service.name}",
                times=count // 2,
                batches=count // 2 + 1,
                acknowledged=count // 2 + 1,
                points=expected,
                lost=max(0, expected - rows),
                doubled=max(0, rows - expected),
                note=f"{refused} of {count // 2} refused; each batch was sent twice",
            )
        )
    return tallies


def revoke_key(*, quick: bool) -> list[Tally]:
    """The key is taken back in the middle of a run, and another one is given."""
    with Service("SQLite") as service, train(service) as training:
        training.run(1.0)
        old, service.key = service.key, service.make_key()
        service.revoke_key(old)
        training.run(3.0 if quick else 40.0, "outage")
        states = {lane.state for lane in training.session.report_delivery().lanes}
        os.environ["QUARK_USER_KEY"] = service.key
        took_s = training.catch_up()
        note = f"lane {', '.join(sorted(states))}; caught up {took_s:.1f} s after the new key"
        return [training.finish(13, "the key is revoked", 1, note)]


def _open(service: Service, folder: Path, run_id: str) -> Any:
    with environment(**service.environment):
        return open_backend(folder, run_id)
