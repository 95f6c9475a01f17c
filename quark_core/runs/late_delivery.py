"""Delivers to mirrors what the end of a run did not wait for: a process of its own.

`python -m quark_core.runs.late_delivery ROOT RUN` begins when its input ends: when the lanes of
the training process have stopped, or that process is gone. It ends when everything is
delivered, or when nothing has got on for a minute; `quark sync` does the rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quark_core.config import settings
from quark_core.hosting.child_process import start_helpers_as_equals
from quark_core.hosting.protocol import lower_priority
from quark_core.system.process import importing

if TYPE_CHECKING:
    from quark_core.runs.open_run import OpenRun

_log = logging.getLogger("quark")

_NOTE = "late_delivery"
_IDLE_S = 60.0
_LONGEST_PAUSE_S = 5.0
_POLL_S = 0.1
_SILENT_S = 1.5  # of a wait
_NEW_GROUP = int(getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0))
_started: list[subprocess.Popen[bytes]] = []


def start_late_delivery(run: OpenRun) -> bool:
    """Start the process for a run that has ended; whether there is one.

    There is none where all is delivered, where a person must mend something first, or where
    QUARK_EXIT_TIMEOUT_SECONDS says how long the end waits for mirrors.

    Args:
        run: The run, whose stream is closed.
    """
    context = run.context
    storage_dir, run_id = context.storage_dir, context.run_id or ""
    if (
        settings.mirror_timeout_s() is None
        or not settings.uses_helpers()
        or not sys.executable
        or run.stream.left_behind is None
        or not run.stream.is_deliverable
    ):
        return False
    run_path = storage_dir / ".quark" / "runs" / run_id
    _started[:] = [process for process in _started if process.poll() is None]
    log_path = run_path / "mirrors" / "processes" / f"{_NOTE}.log"
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    told = {
        "specifications": [choice.specification for choice in run.choices],
        "import_path": [path or os.getcwd() for path in sys.path],
    }
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log, importing():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(storage_dir), run_id],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,
                creationflags=_NEW_GROUP,
            )
        _started.append(process)
        (run_path / _NOTE).write_text(str(process.pid))
        assert process.stdin is not None
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    except (OSError, RuntimeError) as error:  # no process can be had, or Python shuts down
        _log.debug("run %s: its waiting records are left to `quark sync`: %s", run_id, error)
        return False
    thread = threading.Thread(
        target=_let_begin, args=(process, run.stream.wait_for_threads), daemon=True
    )
    with contextlib.suppress(RuntimeError):  # Python shuts down, and that closes the pipe
        thread.start()
    return True


def _let_begin(process: subprocess.Popen[bytes], wait: Callable[[], None]) -> None:
    wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()


def wait_for_late_delivery(storage_dir: Path, timeout_s: float = _IDLE_S) -> None:
    """Wait while such processes of a storage root get on, since a mirror is to be read.

    A wait that can be noticed is logged once: a command that only stands still looks broken.
    """
    notes = list((storage_dir / ".quark" / "runs").glob(f"*/{_NOTE}"))
    begin, is_told = time.monotonic(), False
    while (busy := [*filter(_is_at_work, notes)]) and time.monotonic() < begin + timeout_s:
        if not is_told and time.monotonic() > begin + _SILENT_S:
            names = ", ".join(note.parent.name[:8] for note in busy)
            _log.warning("run %s is still being written to its mirrors. Waiting for it", names)
            is_told = True
        time.sleep(_POLL_S)


def _is_at_work(note: Path) -> bool:
    try:
        pid = int(note.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not command:  # a process that just began has no arguments yet; one that ended lost them
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except (OSError, ValueError):
        return False
    return __name__.encode() in command and note.parent.name.encode() in command


def _main() -> None:
    lower_priority(is_nice=False)  # training is over
    told = json.loads(sys.stdin.buffer.readline())
    sys.stdin.buffer.read()
    start_helpers_as_equals()
    # This is such a process, and nobody waits for its end.
    os.environ[settings.HELPERS] = "0"
    os.environ[settings.EXIT_TIMEOUT] = f"{_IDLE_S:g}"
    known = set(sys.path)
    sys.path += [path for path in told["import_path"] if path not in known]
    root, run_id = Path(sys.argv[1]), sys.argv[2]
    note = root / ".quark" / "runs" / run_id / _NOTE
    try:
        _deliver(root, run_id, told["specifications"], note)
    finally:
        note.unlink(missing_ok=True)


def _deliver(root: Path, run_id: str, specifications: Sequence[str], note: Path) -> None:
    from quark_core.backends.registry import default_registry
    from quark_core.runs import backend_choice, recovery
    from quark_core.runs.backend_choice import choose_backend

    registry = default_registry()
    choices = [choose_backend(one, registry) for one in specifications]
    open_lane = backend_choice.make_lane_opener(choices)
    pause_s = 0.5
    deadline = time.monotonic() + _IDLE_S
    while time.monotonic() < deadline:
        results = recovery.sync(root, run_id=run_id, open_lane=open_lane)
        if all(result.state in ("delivered", "kept") for result in results):
            return
        if any(result.delivered for result in results):
            deadline, pause_s = time.monotonic() + _IDLE_S, 0.5
        elif any(result.state == "waiting" for result in results):
            note.unlink(missing_ok=True)  # a mirror that does not take it is waited for by nobody
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


if __name__ == "__main__":
    _main()
