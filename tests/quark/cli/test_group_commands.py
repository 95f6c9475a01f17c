"""`quark runs --group`, `--group-by`, `--columns`, and what `quark show` says of belonging."""

import json

import pytest

import quark


@pytest.fixture
def sweep(tmp_path, log_run):
    """Two configurations of two seeds each, and one run that is in no group."""
    number = 0
    for lr, group in ((0.1, "paper/fig3"), (0.01, "paper/fig4")):
        for seed in (1, 2):
            number += 1
            log_run(
                tmp_path,
                f"run{number}",
                config={"lr": lr, "width": 64, "seed": seed},
                group=[group, f"seeds/{seed}"],
                values={"loss": [1.0, lr + seed / 100]},
            )
    log_run(tmp_path, "plain", config={"other": 1})
    return tmp_path


def read(invoke, root, *arguments):
    result = invoke("runs", "-d", root, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_group_holds_what_lies_below_it(invoke, sweep):
    assert {run["id"] for run in read(invoke, sweep, "--group", "paper")} == {
        "run1", "run2", "run3", "run4",
    }  # fmt: skip
    assert {run["id"] for run in read(invoke, sweep, "--group", "paper/fig3")} == {"run1", "run2"}
    assert "no group 'pap'" in invoke("runs", "-d", sweep, "--group", "pap").stderr
    assert len(read(invoke, sweep, "--group", "paper", "-n", "3")) == 3


def test_runs_in_json_have_groups_fields_and_digests(invoke, sweep):
    (run,) = [run for run in read(invoke, sweep) if run["id"] == "run1"]
    assert run["groups"] == ["paper/fig3", "seeds/1"]
    assert run["fields"] == {}
    assert len(run["digests"]["config"]) == 32


def test_seeds_of_one_configuration_are_put_together(invoke, sweep):
    groups = read(invoke, sweep, "--group", "paper", "--group-by", "config")
    assert [(g["label"], g["count"], g["measured"]) for g in groups] == [
        ("lr=0.01", 2, 2),
        ("lr=0.1", 2, 2),
    ]
    assert groups[1]["mean"] == pytest.approx(0.115)
    assert groups[1]["deviation"] == pytest.approx(0.0070710678)
    assert (groups[1]["low"], groups[1]["high"]) == pytest.approx((0.11, 0.12))
    table = invoke("runs", "-d", sweep, "--group-by", "config").stdout
    assert "0.115 ± 0.0070711" in table
    assert "lr=0.1 " in table


def test_runs_are_grouped_by_path_field_setting_and_structure(invoke, sweep):
    by_group = read(invoke, sweep, "--group-by", "group")
    assert [(g["key"], g["count"]) for g in by_group] == [
        ("paper/fig4", 2), ("seeds/2", 2), ("seeds/1", 2), ("paper/fig3", 2), (None, 1),
    ]  # fmt: skip
    by_width = read(invoke, sweep, "--group-by", "config.width")
    assert [(g["key"], g["count"]) for g in by_width] == [("64", 4), (None, 1)]
    by_structure = read(invoke, sweep, "--group-by", "structure")
    assert sorted(g["count"] for g in by_structure) == [1, 4]
    by_field = read(invoke, sweep, "--group-by", "field.gpu")
    assert [(g["key"], g["count"]) for g in by_field] == [(None, 5)]


def test_another_figure_is_summed_up_where_that_is_asked_for(invoke, sweep):
    groups = read(
        invoke, sweep, "--group", "paper", "--group-by", "config", "--metric", "max(loss)"
    )
    assert [(g["metric"], g["mean"]) for g in groups] == [("max(loss)", 1.0)] * 2
    groups = read(invoke, sweep, "--group-by", "group", "--metric", "config.lr")
    assert groups[0]["mean"] == pytest.approx(0.01)


def test_a_group_of_one_run_has_no_deviation(invoke, sweep):
    (group,) = read(invoke, sweep, "--where", "id == 'run1'", "--group-by", "config")
    assert (group["count"], group["deviation"]) == (1, None)


def test_no_more_groups_are_shown_than_were_asked_for(invoke, sweep):
    result = invoke("runs", "-d", sweep, "--group-by", "group", "-n", "2")
    assert "There are 5 groups" in result.stdout
    assert "seeds/1" not in result.stdout


def test_columns_are_shown_besides(invoke, sweep):
    shown = invoke(
        "runs", "-d", sweep, "--columns", "max(loss)", "--columns", "config.width"
    ).stdout
    assert "max(loss)" in shown
    assert "config.width" in shown


def test_show_says_groups_version_revision_and_fields(invoke, tmp_path):
    with quark.start_run(
        project="p", config={"a": 1}, group="paper/fig3", version="v7", if_exists="again",
        storage_dir=tmp_path,
    ) as session:  # fmt: skip
        session.annotate(gpu="V100", accuracy=0.98)
    shown = invoke("show", "-d", tmp_path, session.id).stdout
    for words in ("groups", "paper/fig3", "version", "v7", "revision", "gpu", "V100", "0.98"):
        assert words in shown
    assert "uid" not in shown
    told = json.loads(invoke("show", "-d", tmp_path, session.id, "--json").stdout)
    assert told["fields"]["revision"] == 1
    assert told["run"]["groups"] == ["paper/fig3"]


def test_paths_of_groups_are_completed(sweep, monkeypatch):
    from quark.cli.completion import complete_groups
    from quark.cli.runs import runs

    context = runs.make_context("runs", ["-d", str(sweep)])
    found = [item.value for item in complete_groups(context, None, "pap")]
    assert found == ["paper", "paper/fig3", "paper/fig4"]


def test_groups_and_fields_are_edited(invoke, tmp_path, log_run):
    log_run(tmp_path, "one", group="a")
    done = invoke(
        "edit", "-d", tmp_path, "one", "--group", "paper/fig3", "--ungroup", "a",
        "--field", "accuracy=0.98", "--field", "gpu=V100", "--field", 'text="12"',
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "paper/fig3" in done.stdout
    stored = quark.search_runs(storage_dir=tmp_path)[0].stored
    assert stored.run.groups == ("paper/fig3",)
    assert stored.fields == {"accuracy": 0.98, "gpu": "V100", "text": "12"}
    assert invoke("edit", "-d", tmp_path, "one", "--unfield", "gpu").exit_code == 0
    assert "gpu" not in quark.search_runs(storage_dir=tmp_path)[0].stored.fields


def test_groups_are_a_tree_with_what_lies_in_them(invoke, sweep):
    told = json.loads(invoke("groups", "-d", sweep, "--json").stdout)
    assert [(node["path"], node["runs"]) for node in told] == [
        ("paper", 4), ("paper/fig3", 2), ("paper/fig4", 2),
        ("seeds", 4), ("seeds/1", 2), ("seeds/2", 2),
    ]  # fmt: skip
    shown = invoke("groups", "-d", sweep).stdout
    assert "vision" in shown
    assert "\n     fig3" in shown or "    fig3" in shown


def test_the_best_run_of_each_group_is_named(invoke, sweep):
    told = json.loads(invoke("groups", "-d", sweep, "--metric", "loss", "--json").stdout)
    best = {node["path"]: (node["best_run"], round(node["best"], 3)) for node in told}
    assert best["paper"] == ("run3", 0.02)
    assert best["paper/fig3"] == ("run1", 0.11)
    worst = json.loads(
        invoke("groups", "-d", sweep, "--metric", "loss", "--mode", "max", "--json").stdout
    )
    assert worst[0]["best"] == 1.0


def test_a_group_is_described_and_its_tree_says_what_it_is(invoke, sweep):
    done = invoke("groups", "describe", "paper/fig3", "Noise against width.", "-d", sweep)
    assert done.exit_code == 0, done.output
    assert "paper/fig3 of vision: Noise against width." in done.stdout
    assert "Noise against width." in invoke("groups", "-d", sweep, "vision").stdout
    quark.project("vision", storage_dir=sweep).group("paper").update(fields={"venue": "NeurIPS"})
    told = json.loads(invoke("groups", "-d", sweep, "--json").stdout)
    assert told[0]["fields"] == {"venue": "NeurIPS"}
    assert told[1]["description"] == "Noise against width."
    shown = json.loads(invoke("show", "-d", sweep, "run1", "--json").stdout)
    assert shown["inherited"]["fields"] == {"venue": "NeurIPS"}
    assert "NeurIPS" in invoke("show", "-d", sweep, "run1").stdout
    assert invoke("groups", "describe", "paper/fig3", "", "-d", sweep).exit_code == 0
    assert "Noise against" not in invoke("groups", "-d", sweep).stdout


def test_a_path_that_two_projects_may_mean_needs_a_project(invoke, sweep, log_run):
    log_run(sweep, "other", "text", group="paper/fig3")
    result = invoke("groups", "describe", "paper/fig3", "x", "-d", sweep)
    assert result.exit_code == 2
    assert "'text', 'vision'" in result.stderr
    done = invoke("groups", "describe", "paper/fig3", "x", "-d", sweep, "-p", "text")
    assert done.exit_code == 0, done.output
    assert invoke("groups", "describe", "a//b", "x", "-d", sweep, "-p", "text").exit_code == 2


def test_a_project_without_groups_says_how_runs_get_into_one(invoke, sweep, log_run):
    log_run(sweep, "alone", project="elsewhere")
    assert "start_run(group=" in invoke("groups", "-d", sweep, "elsewhere").stdout
    assert json.loads(invoke("groups", "-d", sweep, "elsewhere", "--json").stdout) == []


def test_columns_may_be_listed_by_comma(invoke, sweep):
    table = invoke("runs", "-d", sweep, "--group", "paper", "--columns", "groups, config.lr").stdout
    assert "groups" in table
    assert "config.lr" in table


def test_a_group_that_no_run_is_in_is_described_and_said_to_be_empty(invoke, sweep):
    project = read(invoke, sweep)[0]["project_name"]
    said = invoke("groups", "describe", "papper", "Figures.", "-p", project, "-d", sweep)
    assert said.exit_code == 0, said.output
    assert "The group has no runs yet." in said.output
    said = invoke("groups", "describe", "paper", "Figures.", "-p", project, "-d", sweep)
    assert "The group has no runs yet." not in said.output
