"""What the page of a run has of its timers."""

import time

import quark


def test_a_run_has_its_timers_what_took_the_most_first(look, tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        metrics = quark.MetricsLogger(session)
        for _ in range(3):
            with metrics.chrono("long"):
                time.sleep(0.01)
            with metrics.chrono("short"):
                pass
        metrics.aggregate("norm", 1.0)
    rows = look(tmp_path).json(f"/api/runs/{session.run_id}")["timers"]
    assert [row["key"] for row in rows] == ["long", "short"]
    assert rows[0]["count"] == 2
    assert rows[0]["mean"] >= 0.01
    assert 0 < rows[1]["share"] < rows[0]["share"] <= 1
