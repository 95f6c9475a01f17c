"""`quark why`: what it prints, for people and for programs, and how it ends."""

import json

import quark


def rise(level, wobble=0.0):
    return [level * (1 - 0.7 ** (step + 1)) + wobble for step in range(30)]


def log_seeds(log_run, root):
    for seed in range(4):
        values = {"val/acc": rise(0.9, 0.002 * seed)}
        log_run(root, f"good-{seed}", values=values, config={"lr": 0.1, "seed": seed})
    log_run(root, "bad-0", values={"val/acc": rise(0.5)}, config={"lr": 9.0, "seed": 0})


def test_it_says_verdict_parting_and_cause_in_columns(tmp_path, log_run, invoke):
    log_seeds(log_run, tmp_path)
    done = invoke("why", "good-0", "bad-0", "-d", tmp_path)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    # The last values of both, whose curves rise to 0.9 and to 0.5.
    assert lines[0].startswith("val/acc  0.9 -> 0.5  worse")
    assert "worse" in lines[0]
    assert any(line.startswith("The runs diverge at step 0") for line in lines)
    (cause,) = [line for line in lines if line.startswith("Probably")]
    assert cause.split()[1:6] == ["config", "lr", "0.1", "->", "9.0"]
    assert [line for line in lines if line.startswith("Unknown") and "data" in line]


def test_json_and_status_are_for_programs(tmp_path, log_run, invoke):
    log_seeds(log_run, tmp_path)
    done = invoke("why", "good-0", "bad-0", "-d", tmp_path, "--json", "--fail-on-worse")
    assert done.exit_code == 3
    said = json.loads(done.stdout)
    assert (said["verdict"], said["causes"][0]["place"]) == ("worse", "lr")
    again = invoke("why", "good-0", "good-1", "-d", tmp_path, "--fail-on-worse")
    assert again.exit_code == 0
    assert "no change beyond seed noise" in again.stdout


def test_groups_by_comma_and_one_run_alone(tmp_path, log_run, invoke):
    log_seeds(log_run, tmp_path)
    log_run(tmp_path, "late", values={"val/acc": rise(0.4)}, config={"lr": 0.1, "seed": 3})
    group = invoke("why", "good-0,good-1,good-2", "bad-0", "-d", tmp_path, "--json")
    assert json.loads(group.stdout)["before"]["run_count"] == 3
    alone = json.loads(invoke("why", "late", "-d", tmp_path, "--json").stdout)
    assert (alone["before"]["run_id"], alone["after"]["run_id"]) == ("good-3", "late")
    assert "Compared with good-3, the last good run" in invoke("why", "late", "-d", tmp_path).stdout


def test_it_shows_the_figures_of_runs_grouped_and_both_name_them(tmp_path, log_run, invoke):
    """The values rise and fall, so that medians, best and last values all differ."""
    for config, low in ((0.1, 0.9), (9.0, 0.5)):
        for seed in range(3):
            values = {"val/acc": [0.1, low + 0.09, *[low - 0.2] * 9, low - 0.001 * seed]}
            settings = {"lr": config, "seed": seed}
            log_run(tmp_path, f"lr{config:g}-{seed}", values=values, config=settings)
    sides = (",".join(f"lr{rate}-{seed}" for seed in range(3)) for rate in ("0.1", "9"))
    why = invoke("why", *sides, "-d", tmp_path).stdout.splitlines()[0]
    assert why.startswith("val/acc  0.899 -> 0.499  worse (means of last values")
    grouped = ("runs", "--group-by", "config", "--metric", "val/acc", "-d", tmp_path)
    assert "last val/acc" in invoke(*grouped).stdout
    means = [group["mean"] for group in json.loads(invoke(*grouped, "--json").stdout)]
    assert [f"{mean:.3g}" for mean in means] == ["0.499", "0.899"]
    single = invoke("why", "lr0.1-1", "lr9-2", "-d", tmp_path).stdout.splitlines()[0]
    assert single.startswith("val/acc  0.899 -> 0.498  worse (last values; ")


def test_a_check_without_yes_runs_nothing(tmp_path, log_run, invoke):
    log_seeds(log_run, tmp_path)
    done = invoke("why", "good-0", "bad-0", "-d", tmp_path, "--check", "2")
    assert "\n2 runs of the first with lr=9.0\n" in done.stdout
    assert "No runs were started" in done.stdout
    assert len(quark.search_runs(storage_dir=tmp_path)) == 5
