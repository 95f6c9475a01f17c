"""A training in a process of its own, which a test leads: `training_program.py STORAGE CALL …`.

CALL is start or resume. What follows is KEY=VALUE: its arguments as JSON, or

resolver=hangs     no host name is ever resolved; since no resolver can be set up for one process,
                   `socket.getaddrinfo` hangs in its place
patience_s=SECONDS  a start waits so long for its service, in place of the seconds that are promised

It says on a line of JSON how the call went, and how long it took but for the time in which there
was no processor for it; then it does what comes on its input:

log FIRST STOP     log the metric m once for each step
fork FIRST STOP    the same in a forked child, and wait for it
spawn FIRST STOP   the same in a spawned child that is given the context
flush              wait until the store has all of it
end STATUS         end the run, and the process
"""

import contextlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from pathlib import Path

import quark
from quark_core.runs import primary_store

storage_dir, call, *given = sys.argv[1:]


def log_steps(session, first, stop):
    with quark.MetricsLogger(session) as metrics:
        for step in range(first, stop):
            metrics.log("m", float(step), step=step)


def work(context, first, stop):
    log_steps(context, first, stop)


def read_delay_s():
    """How long threads of this process have waited for a processor, as far as the system says."""
    delays_ns = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            delays_ns.append(int(path.read_text().split()[1]))
    return sum(delays_ns) / 1e9


def say(**found):
    os.write(1, f"{json.dumps(found)}\n".encode())


def main():
    arguments = dict(argument.split("=", 1) for argument in given)
    if arguments.pop("resolver", None) == "hangs":
        socket.getaddrinfo = lambda *_args, **_options: threading.Event().wait()
    if patience_s := arguments.pop("patience_s", None):
        primary_store._FIRST_S = primary_store._RESTART_S = float(patience_s)
    arguments = {name: json.loads(value) for name, value in arguments.items()}
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("quark").addHandler(handler)
    begin = quark.start_run if call == "start" else quark.resume_run
    if call == "start":
        arguments["project"] = "p"
    began_s, delay_s = time.monotonic(), read_delay_s()

    def measure_s():
        return time.monotonic() - began_s - max(0.0, read_delay_s() - delay_s)

    try:
        session = begin(storage_dir=storage_dir, **arguments)
    except quark.QuarkError as error:
        say(took_s=measure_s(), error=type(error).__name__, message=str(error))
        return
    took_s = measure_s()
    attempt = session.context.run.attempt
    said = " | ".join(warnings)
    say(took_s=took_s, run_id=session.run_id, attempt=attempt, message=said, error=None)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "end":
            session.end_run(rest[0])
            say(warnings=warnings)
            return
        if word == "flush":
            session.flush(timeout_s=60)
            say(done=word)
            continue
        first, stop = map(int, rest)
        if word == "log":
            log_steps(session, first, stop)
        else:
            context = multiprocessing.get_context(word)
            target = session if word == "fork" else session.context
            child = context.Process(target=work, args=(target, first, stop))
            child.start()
            child.join(250)
            assert child.exitcode == 0
        session.flush("journaled")
        say(done=line.strip())


if __name__ == "__main__":
    main()
