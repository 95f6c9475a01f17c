"""What this node's disks and network carry, through psutil."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from quark_core.system.process import importing

_ROOT = "/"
_LEAST_WINDOW_S = 0.1


class TrafficReader:
    """Reads rates of the whole node since the reading before. One thread uses it."""

    def __init__(self) -> None:
        self._earlier: dict[str, int] = {}
        self._at_s = 0.0

    def read(self) -> dict[str, float]:
        """Figures by name; of what cannot be had there is none. Takes a millisecond or so."""
        try:
            with importing():
                import psutil
        except Exception:  # noqa: BLE001 - a broken installation may raise anything
            return {}
        now_s = time.monotonic()
        counted = _count(psutil)
        passed_s = now_s - self._at_s
        figures = {
            f"{name}_bytes_per_s": round(max(0, count - self._earlier[name]) / passed_s, 1)
            for name, count in counted.items()
            if name in self._earlier and passed_s >= _LEAST_WINDOW_S
        }
        self._earlier, self._at_s = counted, now_s
        # Platforms differ in what they raise, and a container may hide what there is.
        with suppress(Exception):
            figures["disk_usage_percent"] = float(psutil.disk_usage(_ROOT).percent)
        return figures


def _count(psutil: Any) -> dict[str, int]:
    """Bytes since the boot, by what they are."""
    counted: dict[str, int] = {}
    with suppress(Exception):
        disk = psutil.disk_io_counters()
        if disk is not None:
            counted |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
    with suppress(Exception):
        network = psutil.net_io_counters()
        if network is not None:
            counted |= {
                "network_received": network.bytes_recv,
                "network_sent": network.bytes_sent,
            }
    return counted
