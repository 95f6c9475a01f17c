"""The process that sends one notice: reads what and where to on its input, and answers in JSON.

It is ended from outside where it takes too long, and ends by itself where whoever would do that
was ended before: a server that answers a byte at a time would keep it for days. What the
libraries in it log or print is nobody's affair, since it holds addresses: only what is known to
hold none is answered.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import os
import re
import socket
import sys
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any

_WEBHOOK = "webhook+"
_TOO_MANY, _SERVER_ERROR = 429, 500
_CODE = re.compile(r"error=(\d{3})\b")
_NOT_REACHED = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|Connection refused|Errno 111"
    r"|ConnectionRefused|gaierror"
)
_TYPES = {"info": "info", "warning": "warning", "error": "failure", "critical": "failure"}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def main() -> None:
    """Send one notice."""
    request = json.loads(sys.stdin.buffer.read())
    deadline = threading.Timer(request["timeout_s"], os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    answer_to = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        send = _send_webhook if request["url"].startswith(_WEBHOOK) else _send_by_apprise
        outcome, said = send(request)
    except Exception as error:  # noqa: BLE001 - it may be anything, and its text may hold secrets
        outcome, said = "unknown", type(error).__name__
    os.write(answer_to, json.dumps({"outcome": outcome, "said": said}).encode())


def _send_webhook(request: Mapping[str, Any]) -> tuple[str, str]:
    url = urllib.parse.urlsplit(request["url"].removeprefix(_WEBHOOK))
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=request["timeout_s"])
    try:
        connection.connect()
    except (OSError, http.client.HTTPException) as error:
        return "busy", f"it cannot be reached ({type(error).__name__})"
    target = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
    headers = dict(request["headers"])
    if url.username:
        user = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
    try:
        connection.request("POST", target, request["body"].encode(), headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        late = isinstance(error, socket.timeout)
        return "unknown", "no answer in time" if late else type(error).__name__
    return _judge(status)


def _judge(status: int) -> tuple[str, str]:
    if 200 <= status < 300:
        return "taken", ""
    again = status == _TOO_MANY or status >= _SERVER_ERROR
    # A redirection is not followed: what is sent is meant for that address alone.
    return ("busy" if again else "refused"), f"HTTP {status}"


def _send_by_apprise(request: Mapping[str, Any]) -> tuple[str, str]:
    import apprise

    lines = _Lines()
    logger = logging.getLogger("apprise")
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    asset = apprise.AppriseAsset()
    # As of a webhook: what is sent is meant for that address, and not for where it leads.
    asset.http_redirects = False
    target = apprise.Apprise(asset=asset)
    if not target.add(request["url"]):
        return "refused", "Apprise does not support this URL"
    # What fails is tried again from outside, so that each try has its bound.
    with contextlib.redirect_stdout(sys.stderr):
        taken = target.notify(
            title=request["title"],
            body=request["text"],
            notify_type=_TYPES[request["severity"]],
            body_format=apprise.NotifyFormat.TEXT,
        )
    if taken:
        return "taken", ""
    code = _CODE.search(lines.text)
    if code is not None:
        return _judge(int(code[1]))
    if _NOT_REACHED.search(lines.text):
        return "busy", "it cannot be reached"
    return "unknown", "the receiver did not accept it"


if __name__ == "__main__":
    main()
