"""A minute without the service, under a training: what steps take meanwhile."""

from __future__ import annotations

from durability.outage import _sum_up_phases
from figures import print_rows

from serving.servers import Service
from serving.tally import Tally
from serving.training import open_proxy, train


def measure_outage(*, quick: bool) -> list[Tally]:
    """The service hangs, then refuses, for a minute in all."""
    around_s, outage_s = (2.0, 4.0) if quick else (15.0, 60.0)
    with (
        Service("SQLite") as service,
        open_proxy(service) as proxy,
        train(service, proxy.url) as training,
    ):
        training.run(1.0, "warm-up")
        training.run(around_s, "before")
        proxy.set_mode("hang")
        training.run(outage_s / 2, "outage")
        proxy.set_mode("refuse")
        training.run(outage_s / 2, "outage")
        proxy.set_mode("pass")
        took_s = training.catch_up()
        training.run(around_s, "after")
        training.loop.taken.pop("warm-up")
        print_rows(
            f"The service is away for {outage_s:g} s: step times, and of that logging",
            _sum_up_phases(training.loop),
        )
        note = f"caught up after {took_s:.1f} s"
        return [training.finish(23, f"{outage_s:g} s without the service", 1, note)]
