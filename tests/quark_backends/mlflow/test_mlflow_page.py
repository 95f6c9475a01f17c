"""The page over a real MLflow server: runs that Quark mirrored, and those that never saw it."""

import pytest
from everything_runs import STEPS, log_everything, read_all
from page_client import PageClient

from quark.page.routes.page_source import open_source

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:metric .* breaks Quark's naming rule:RuntimeWarning"),
]


@pytest.fixture
def page(tmp_path, server):
    client = PageClient(open_source(tmp_path, f"mlflow:{server.uri}?quark=full"))
    yield client
    client.app.state.page.desk.close(60)
    client.app.state.page.tables.close()
    client.source.close()


def test_all_of_a_mirrored_run_is_there(page, tmp_path, server, empty_server):
    ids = [
        log_everything(
            tmp_path,
            f"whole-{seed}",
            lr=0.1 + seed,
            seed=seed,
            backends=f"mlflow:{server.uri}?quark=full",
        )
        for seed in range(2)
    ]
    found = read_all(page, *ids)
    assert set(found["listed"]) == set(ids)
    assert [len(curves[0]["step"]) for curves in found["curves"].values()] == [STEPS] * 2
    assert (
        found["analysis"]["note"]
        == "analyzed for this page, because mlflow does not store analyses"
    )
    assert (found["batches"]["batch_count"], len(found["system"]["ranks"])) == (40, 1)
    assert [row["name"] for row in found["layers"]["rows"]] == ["blocks.0"]
    assert found["tables"]["scores"]["rows"][1] == [1, 0.5]
    assert found["verdict"]["state"] == "computed"


def test_of_a_run_of_others_what_is_not_read_is_said(page, foreign):
    run, parent = foreign
    found = read_all(page, run.info.run_id, parent.info.run_id)
    points = {curve["name"]: curve["points"] for (curve,) in found["curves"].values()}
    assert points["train loss"] == 200
    assert found["run"]["config"]["lr"] == 0.1
    assert (found["artifacts"], found["events"], found["system"]["fields"]) == ([], [], [])
    for kind in ("artifact", "event", "telemetry", "batch", "layer"):
        assert "mlflow has no data of this run" in found["run"]["absent"][kind]
    # The parent has no metric: there is nothing to tell, and that is what is told.
    assert found["verdict"]["state"] in ("computed", "failed")
    assert found["verdict"]["state"] == "computed" or found["verdict"]["note"]
