"""A fork comes between two transactions of the store, never into one."""

import os
import threading
import time

import pytest

from quark_backends.store.upkeep.background import WriteGate

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_a_fork_waits_until_what_is_being_stored_is_stored():
    gate, begun, stored = WriteGate(), threading.Event(), []

    def store():
        with gate.write():
            begun.set()
            time.sleep(0.2)
            stored.append(True)

    thread = threading.Thread(target=store)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        # Nobody holds the gate here, and what was begun is whole.
        os._exit(0 if stored and gate._lock.acquire(timeout=1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    with gate.write():
        pass


def test_a_fork_does_not_wait_for_ever():
    gate = WriteGate()
    with gate.write():
        child = os.fork()
        if child == 0:
            os._exit(0 if gate._lock.acquire(timeout=1.0) else 1)
        assert os.waitpid(child, 0)[1] == 0
    with gate.write():
        pass
