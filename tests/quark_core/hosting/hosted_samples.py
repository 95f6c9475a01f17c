"""Backends that a helper process can find by their module."""

import logging
import os
import sys
from pathlib import Path

from quark_core.errors import (
    BackendRejected,
    BackendUnauthorized,
    BackendUnavailable,
    BackendUnusable,
)


class Recorder:
    """Writes a line per batch: who stored it, and what it was; misbehaves as the options say."""

    def __init__(self, config):
        self.path = Path(config.location)
        self.options = config.options
        if config.options.get("fault") == "closed":
            raise BackendUnavailable("not today", retry_after_s=7.0)

    def write(self, batch):
        fault = self.options.get("fault")
        if fault == "rejected":
            raise BackendRejected("will never do", backend="recorder")
        if fault == "unavailable":
            raise BackendUnavailable("come again", backend="recorder", retry_after_s=3.5)
        if fault == "token" and os.environ["RECORDER_TOKEN"] != self.path.with_suffix(
            ".valid"
        ).read_text("utf-8"):
            raise BackendUnauthorized("RECORDER_TOKEN has run out")
        if fault == "unauthorized":
            raise BackendUnauthorized("no key")
        if fault == "unusable":
            raise BackendUnusable("no address")
        if fault == "exit":
            sys.exit("enough")
        if fault == "bug":
            raise KeyError("oops")
        if fault == "warning":
            logging.getLogger("quark").warning("backend %s is odd", "recorder")
        if fault == "print":
            print("to whoever reads standard output")
        self._note("write", batch.number)

    def close(self):
        self._note("close", -1)

    def _note(self, what, number):
        with self.path.open("a") as file:
            file.write(f"{os.getpid()} {what} {number}\n")


class Keeper(Recorder):
    """Takes groups and payloads too."""

    def write_group(self, batches):
        self._note("group", len(batches))
        for batch in batches:
            self.write(batch)

    def put_payload(self, payload):
        self._note(payload.path.read_text(), payload.size_bytes)

    def open_payload(self, run_id, sha256):
        raise NotImplementedError

    def payload_directory(self, run_id):
        return None


def open_recorder(config):
    return Recorder(config)


def open_keeper(config):
    return Keeper(config)
