"""Tables of metrics, in the forms that tools write."""

import csv
import os

import pytest

import quark


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def values(points):
    return [(step, value) for step, value, _ in points]


def test_a_wide_table_has_a_metric_in_each_column(tmp_path, take, read_points):
    path = write(
        tmp_path / "exp" / "metrics.csv",
        "epoch,step,train_loss,val/acc@1,note",
        "0,0,0.5,,warm",
        "0,1,0.25,,warm",
        "0,1,,0.75,",
    )
    (run,) = take("csv", path)
    assert (run["name"], run["project"], run["points"]) == ("exp", "exp", 3)
    assert values(read_points(run["run_id"], "train_loss")) == [(0, 0.5), (1, 0.25)]
    assert values(read_points(run["run_id"], "val/acc_x40_1")) == [(1, 0.75)]
    assert [(one["kind"], one["name"], one["count"]) for one in run["losses"]] == [
        ("column", "note", 2)
    ]


def test_a_long_table_has_a_point_in_each_row_and_runs_in_a_column(tmp_path, take, read_points):
    path = write(
        tmp_path / "all.csv",
        "Run,metric,step,timestamp,value",
        "a,loss,0,1700000000000,1.5",
        "b,loss,0,1700000001000,2.5",
        "a,loss,1,1700000002000,nan",
    )
    first, second = take("csv", path)
    assert (first["name"], second["name"]) == ("a", "b")
    ((step, value, time_us), (_, lost, _)) = read_points(
        first["run_id"], "loss", include_non_finite=True
    )
    assert (step, value, time_us) == (0, 1.5, 1700000000000000)
    assert lost != lost
    assert read_points(second["run_id"], "loss") == [(0, 2.5, 1700000001000000)]


def test_a_run_began_and_ended_when_its_rows_say(tmp_path, take, store):
    path = write(tmp_path / "t.csv", "step,timestamp,loss", "0,1700000000,1", "1,1700000060,2")
    (run,) = take("csv", path)
    record = quark.open_run(run["run_id"], storage_dir=store).context.run
    assert record.created_at == "2023-11-14T22:13:20.000000Z"
    assert record.ended_at == "2023-11-14T22:14:20.000000Z"


def test_what_tensorboard_lets_one_download_is_known(tmp_path, take, read_points):
    path = write(tmp_path / "run-exp1-tag-loss.csv", "Wall time,Step,Value", "1700000000.5,7,0.125")
    (run,) = take("csv", path)
    assert read_points(run["run_id"], "loss") == [(7, 0.125, 1700000000500000)]


def test_what_a_chart_of_wandb_lets_one_download_is_a_run_for_each_curve(
    tmp_path, take, read_points
):
    path = write(
        tmp_path / "wandb_export.csv",
        '"Step","fast-1 - loss","fast-1 - loss__MIN","fast-1 - loss__MAX",'
        '"slow-2 - loss","slow-2 - loss__MIN","slow-2 - loss__MAX"',
        '"0","0.5","0.5","0.5","0.75","0.75","0.75"',
        '"1","0.25","0.25","0.25","","",""',
    )
    fast, slow = take("csv", path)
    assert (fast["name"], slow["name"]) == ("fast-1", "slow-2")
    assert values(read_points(fast["run_id"], "loss")) == [(0, 0.5), (1, 0.25)]
    assert values(read_points(slow["run_id"], "loss")) == [(0, 0.75)]


def test_rows_that_come_later_come_once_and_a_half_written_one_when_it_is_whole(
    tmp_path, take, read_points
):
    path = write(tmp_path / "log.csv", "step,loss", "0,1.0")
    (first,) = take("csv", path)
    with path.open("a") as file:
        file.write("1,0.5\n2,0.2")
    (second,) = take("csv", path)
    assert second["points"] == 1
    assert [one["kind"] for one in second["losses"]] == ["row"]
    with path.open("a") as file:
        file.write("5\n")
    (third,) = take("csv", path)
    assert third["points"] == 1
    assert values(read_points(first["run_id"], "loss")) == [(0, 1.0), (1, 0.5), (2, 0.25)]


def test_a_file_that_is_written_anew_with_more_columns_is_read_on(tmp_path, take, read_points):
    path = write(tmp_path / "metrics.csv", "step,loss", "0,1.0")
    (first,) = take("csv", path)
    write(path, "step,loss,acc", "0,1.0,", "1,0.5,0.9")
    (second,) = take("csv", path)
    assert second["points"] == 2
    assert values(read_points(first["run_id"], "loss")) == [(0, 1.0), (1, 0.5)]


def test_a_file_that_has_become_shorter_is_refused_with_its_reason(tmp_path, take):
    path = write(tmp_path / "log.csv", "step,loss", "0,1.0", "1,2.0")
    take("csv", path)
    write(path, "step,loss", "0,1.0")
    (run,) = take("csv", path, status=1)
    assert "shorter" in run["failure"]


@pytest.mark.parametrize(
    ("lines", "why"), [(["step,epoch", "0,1"], "no numeric column"), ([], "no header yet")]
)
def test_a_table_without_metrics_fails_alone(tmp_path, take, lines, why):
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "bad.csv").write_text("\n".join(lines))
    write(folder / "good.csv", "step,loss", "0,1.0")
    bad, good = take("csv", folder, status=1)
    assert why in bad["failure"]
    assert good["points"] == 1


@pytest.mark.filterwarnings("ignore:metric '_odd':RuntimeWarning")
def test_our_own_mirror_gives_the_run_back_as_it_was(tmp_path, take, store, read_points):
    logged = tmp_path / "logged"
    session = quark.start_run(
        project="p", storage_dir=logged, backends="csv", name="n", tags=["a"], config={"lr": 0.1}
    )
    metrics = quark.MetricsLogger(session)
    for step in range(3):
        metrics.log("train/loss", 1 / (step + 1), step=step, epoch=0)
        metrics.log("_odd", step, step=step)
    own = {key: metrics.columns(metric_key=key) for key in ("train/loss", "x5f_odd")}
    session.end_run("failed")
    (run,) = take("csv", logged / ".quark" / "runs" / session.run_id / "csv")
    assert run["run_id"] == session.run_id
    for key, columns in own.items():
        assert read_points(run["run_id"], key) == list(
            zip(
                *(columns[name].tolist() for name in ("step", "value", "time_us")),
                strict=True,
            )
        )
    record = quark.open_run(run["run_id"], storage_dir=store).context.run
    assert (record.status, record.name, record.tags) == ("failed", "n", ("a",))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # MLflow's own, of its libraries
def test_a_table_of_mlflows_runs_is_a_run_for_each_row(tmp_path, take, read_points, store):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("exp")
    with mlflow.start_run(run_name="r1"):
        mlflow.log_params({"lr": 0.1, "layers": 3})
        mlflow.log_metric("loss", 0.5)
    path = tmp_path / "runs.csv"
    mlflow.search_runs(experiment_names=["exp"]).to_csv(path, index=False)
    (run,) = take("csv", path)
    assert run["name"] == "r1"
    assert values(read_points(run["run_id"], "loss")) == [(0, 0.5)]


def test_a_table_as_pandas_and_excel_write_it(tmp_path, take, read_points):
    path = tmp_path / "t.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\r\n")
        writer.writerows([["", "iteration", "loss"], [0, 10, 1.5], [1, 20, 0.5]])
    os.utime(path, (1_700_000_000, 1_700_000_000))
    (run,) = take("csv", path)
    assert read_points(run["run_id"], "loss") == [
        (10, 1.5, 1_700_000_000_000_000),
        (20, 0.5, 1_700_000_000_000_000),
    ]


def test_numbers_that_float64_cannot_hold_are_kept_and_told_of(tmp_path, take, read_points):
    path = write(
        tmp_path / "big.csv",
        "step,tokens,even,huge,odd",
        "0,9007199254740993,9007199254740994,1e400,inf",
        f"1,9007199254740992,9.1e15,-{10**400},nan",
    )
    (run,) = take("csv", path)
    assert values(read_points(run["run_id"], "tokens")) == [(0, 2.0**53), (1, 2.0**53)]
    assert values(read_points(run["run_id"], "huge")) == [(0, float("inf")), (1, -float("inf"))]
    assert [(one["name"], one["count"]) for one in run["losses"]] == [("tokens", 1), ("huge", 2)]
    assert "rounded to float64" in run["losses"][0]["reason"]
