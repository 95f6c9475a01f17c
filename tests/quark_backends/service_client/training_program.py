"""A training in a process of its own, which a test leads: `training_program.py STORAGE CALL …`.

CALL is start or resume. What follows is KEY=VALUE: its arguments as JSON, or

resolver=hangs     no host name is ever resolved; since no resolver can be set up for one process,
                   `socket.getaddrinfo` hangs in its place

It says on a line of JSON how the call went, then does what comes on its input:

log FIRST STOP     log the metric m once for each step
fork FIRST STOP    the same in a forked child, and wait for it
spawn FIRST STOP   the same in a spawned child that is given the context
flush              wait until the store has all of it
end STATUS         end the run, and the process
"""

import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time

import quark

storage_dir, call, *given = sys.argv[1:]


def log_steps(session, first, stop):
    with quark.MetricsLogger(session) as metrics:
        for step in range(first, stop):
            metrics.log("m", float(step), step=step)


def work(context, first, stop):
    log_steps(context, first, stop)


def say(**found):
    os.write(1, f"{json.dumps(found)}\n".encode())


def main():
    arguments = dict(argument.split("=", 1) for argument in given)
    if arguments.pop("resolver", None) == "hangs":
        socket.getaddrinfo = lambda *_args, **_options: threading.Event().wait()
    arguments = {name: json.loads(value) for name, value in arguments.items()}
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("quark").addHandler(handler)
    begin = quark.start_run if call == "start" else quark.resume_run
    if call == "start":
        arguments["project"] = "p"
    began_s = time.monotonic()
    try:
        session = begin(storage_dir=storage_dir, **arguments)
    except quark.QuarkError as error:
        took_s = time.monotonic() - began_s
        say(took_s=took_s, error=type(error).__name__, message=str(error))
        return
    took_s = time.monotonic() - began_s
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
            child.join(60)
            assert child.exitcode == 0
        session.flush("journaled")
        say(done=line.strip())


if __name__ == "__main__":
    main()
