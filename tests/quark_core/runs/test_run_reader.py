"""RunReader: a run is read with no session, no stream and no writer."""

import subprocess
import sys

import pytest

import quark
from quark_core.records.query import Query
from quark_core.runs.open_run import open_runs
from quark_core.runs.run_reader import open_run_reader, read_run


def start(root):
    return quark.start_run(project="p", config={"lr": 0.1}, storage_dir=root, capture=None)


def count_points(reader):
    return reader.read("metric", Query()).count


def test_a_stored_run_is_read_by_the_beginning_of_its_id_and_closed(tmp_path):
    with start(tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 0.5, step=1)
    reader = open_run_reader(session.run_id[:6], tmp_path)
    assert (reader.run_id, reader.held, reader.context.read_only) == (session.run_id, None, True)
    assert reader.stored.config.values == {"lr": 0.1}
    assert reader.stored.state == "completed"
    assert count_points(reader) == 1
    assert open_runs.find(session.run_id) is None
    reader.close()
    assert str(reader).startswith("RunReader(")


def test_a_run_of_this_process_is_flushed_before_it_is_read_and_stays_open(tmp_path):
    with start(tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for step, target in enumerate((session, session.context, metrics, read_run(session))):
            metrics.log("loss", 0.5, step=step)
            reader = read_run(target)
            assert reader.held is session.open_run
            assert count_points(reader) == step + 1
            reader.close()
    assert session.status == "completed"


def test_only_what_has_a_run_is_read():
    with pytest.raises(quark.SchemaValidationError, match="not int"):
        read_run(7)


def test_analyses_and_comparisons_load_no_session(tmp_path):
    with start(tmp_path) as session:
        quark.MetricsLogger(session).log("loss", 0.5, step=1)
    script = (
        "import sys\n"
        "from quark.analysis.comparison.engine import ComparisonEngine\n"
        "from quark.analysis.explanation.engine import explain_change\n"
        "from quark.analysis.outputs import open_analysis\n"
        "from quark_core.runs.run_reader import open_run_reader\n"
        "reader = open_run_reader(sys.argv[1], sys.argv[2])\n"
        "assert open_analysis(reader).load().metrics\n"
        "ComparisonEngine.compare_runs(reader, sys.argv[1])\n"
        "explain_change(reader, reader)\n"
        "assert 'quark_core.sessions.session' not in sys.modules\n"
    )
    arguments = [sys.executable, "-c", script, session.run_id, str(tmp_path)]
    subprocess.run(arguments, check=True)
