"""Ports for servers that a test starts, or stops and starts again."""

import socket


def hold_port():
    """A socket that keeps a free port of 127.0.0.1 from others, and the port.

    Nobody is answered there, but a server that also sets SO_REUSEADDR may come
    and go without another process's connection taking its place meanwhile.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    return place, place.getsockname()[1]
