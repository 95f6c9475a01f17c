"""A child that is forked while a thread of ours imports is not left with a locked import."""

import os
import textwrap

import pytest
from kit.programs import run_code

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PROGRAM = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import quark
delay_s = float(sys.argv[2])
session = quark.start_run(project="p", storage_dir=sys.argv[1])
telemetry = quark.SystemTelemetry(session)
with telemetry.start_step(0):
    pass
time.sleep(delay_s)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs is killed by it
    import psutil, ctypes, subprocess, importlib.metadata
    telemetry.sample()
    telemetry.record_step(1)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.sampled
@pytest.mark.parametrize("delay_ms", [0, 3, 8, 15, 30])
def test_a_child_that_is_forked_early_can_import(tmp_path, delay_ms):
    done = run_code(textwrap.dedent(PROGRAM), tmp_path, delay_ms / 1000)
    assert done.stdout.strip() == "7"
