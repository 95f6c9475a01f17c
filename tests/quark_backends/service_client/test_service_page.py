"""The page over a service: the same answers as over a store of this machine."""

import pytest
from everything_runs import STEPS, log_everything, read_all
from page_client import PageClient

from quark.page.routes.page_source import open_source


@pytest.mark.long
def test_all_of_a_run_in_a_service_is_there(tmp_path, service):
    for seed in range(2):
        log_everything(tmp_path, f"whole-{seed}", lr=0.1 + seed, seed=seed)
    client = PageClient(open_source(tmp_path))
    try:
        found = read_all(client, "whole-0", "whole-1")
    finally:
        client.app.state.page.desk.close(60)
        client.app.state.page.tables.close()
        client.source.close()
    assert found["about"]["backend"] == "service"
    assert all(found["about"]["capabilities"].values())
    assert [len(curves[0]["step"]) for curves in found["curves"].values()] == [STEPS] * 2
    assert (found["batches"]["batch_count"], len(found["system"]["ranks"])) == (40, 1)
    assert found["tables"]["scores"]["count"] == 300
    assert found["verdict"]["state"] == "computed"
    assert found["run"]["absent"] == {}
