"""A process may end while a thread of a run is at its store: it ends by itself, and has it all."""

import pytest
from kit.programs import run_script

import quark

# A thread prepares statements in its first transaction, again and again, as the process ends.
TRAINING = """
from quark_backends.store.databases.connection import SqliteConnection
from quark_core.runs.backend_choice import open_reader
from quark_core.records.query import RunSearch

asked = threading.Event()
seconds, asks = float(os.environ["ASKS_S"]), os.environ["ASKS"]
execute = SqliteConnection.execute
session = quark.start_run(project="p", storage_dir=storage_dir, system_metrics=False)
reader = session.open_run.reader
asking = {
    "stop": lambda: reader.find_stop(session.id),
    "read": lambda: reader.load_run(session.id),
    "search": lambda: reader.search(RunSearch(project="p")),
    "another": lambda: open_reader(session.context.storage_dir).load_run(session.id),
    "compaction": lambda: reader._compaction._run(),
}[asks]
if asks == "compaction":
    reader._compaction._wake.set()

def execute_for_long(self, sql, *values):
    if threading.current_thread() is thread and (asks == "compaction" or sql.startswith("BEGIN")):
        end = time.monotonic() + seconds
        number = 0
        while time.monotonic() < end:
            number += 1
            execute(self, f"SELECT count(*), {number} FROM sqlite_master, sqlite_master").fetchone()
            asked.set()
    return execute(self, sql, *values)

quark.MetricsLogger(session).log("m", 1.0, step=0)
session.flush()
thread = threading.Thread(target=asking, name="quark-asks", daemon=True)
SqliteConnection.execute = execute_for_long
thread.start()
assert asked.wait(60)
print(session.id)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "asks",
    ["stop", "read", "search", "another", "compaction", "journals: read", "journals: search"],
)
@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(60.0, marks=pytest.mark.long)], ids=["in time", "for ever"]
)
def test_a_process_that_ends_while_its_store_is_asked_ends_by_itself(
    tmp_path, monkeypatch, asks, seconds
):
    if asks.startswith("journals"):
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    # `run_script` sees that the status is 0.
    said, _ = run_script(tmp_path, TRAINING, ASKS_S=str(seconds), ASKS=asks.split()[-1])
    run = quark.open_run(said.strip(), tmp_path)
    assert run.status == "completed"
    assert [record.step for record in quark.MetricsLogger(run).read(metric_key="m")] == [0]


# The first read of all comes after the start, and so does what closes its connection.
ORDER = """
import weakref
from quark_backends.store.databases import connection
from quark_core.runs import open_run

session = quark.start_run(project="p", storage_dir=storage_dir, system_metrics=False)
session.open_run.reader.find_stop(session.id)
# Of others, which Python calls before the runs end.
weakref.finalize(session, print, "finalizers", flush=True)
end_stream = open_run.OpenRun.end_stream

def end_and_tell(self, *arguments):
    print("the run ends", len(connection._open), flush=True)
    return end_stream(self, *arguments)

open_run.OpenRun.end_stream = end_and_tell
connection.call_last(lambda: print("acts", len(connection._open), flush=True))
connection.call_last(lambda: print("closings", len(connection._open), flush=True), closes=True)
"""


def test_connections_are_closed_once_the_runs_have_ended(tmp_path):
    said, _ = run_script(tmp_path, ORDER)
    assert said.split("\n") == ["finalizers", "the run ends 1", "acts 1", "closings 0", ""]
