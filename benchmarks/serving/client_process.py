"""One client in a process of its own: waits for the word, sends batches, says how long it took.

    python -m serving.client_process RUN_ID BATCHES GROUP

The service is that of QUARK_PERSISTENCE_URL. Prints "ready", waits for a line
on stdin, then prints JSON: the seconds and the time of each call.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from serving.work import make_batches, open_backend


def main() -> None:
    run_id, count, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        backend = open_backend(Path(folder), run_id)
        start, batches = make_batches(run_id, count)
        backend.write(start)
        print("ready", flush=True)
        sys.stdin.readline()
        calls = []
        begin = time.perf_counter()
        for place in range(0, count, group):
            called = time.perf_counter()
            if group == 1:
                backend.write(batches[place])
            else:
                backend.write_group(batches[place : place + group])
            calls.append(time.perf_counter() - called)
        taken_s = time.perf_counter() - begin
        backend.close()
    print(json.dumps({"taken_s": taken_s, "calls_s": calls, "began_s": begin}), flush=True)


if __name__ == "__main__":
    main()
