"""A metric that no run has is refused with the names near it; a changed setting is shown."""

import quark


def test_follow_only_says_so_of_a_run_that_may_get_it(invoke, start, tmp_path):
    with start(tmp_path, "r1") as session:
        quark.MetricsLogger(session).log("train/loss", 1.0, step=1)
        session.flush()
        done = invoke("follow", "r1", "-d", tmp_path, "--once", "--no-analyze", "--metric", "loss")
    assert done.exit_code == 0
    assert "has no metric 'loss'; similar names: 'train/loss', so far" in done.stderr


def test_a_changed_setting_and_what_it_was_are_shown(invoke, start, tmp_path):
    with start(tmp_path, "r1", config={"lr": 0.1}) as session:
        session.config["lr"] = 0.25
    shown = invoke("show", "r1", "-d", tmp_path).stdout
    assert "lr       0.25" in shown
    assert "config: lr 0.1 becomes 0.25" in shown
