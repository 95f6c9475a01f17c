"""Ports that stay ours while the server that is to have them is not there."""

from __future__ import annotations

import socket


def hold_port() -> tuple[socket.socket, int]:
    """A socket that keeps a free port of 127.0.0.1 from others until it is closed, and the port.

    Nobody is answered there, but a server that also sets SO_REUSEADDR may come and go.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    return place, place.getsockname()[1]
