"""A store that is deleted, made anew or put back under a server that shows it."""

import shutil

import pytest
from page_client import log_plain_run
from ui_process import UiProcess

import quark
from quark.page.pack import decode_pack
from quark_core.records import LayerSummaryRecord
from quark_core.records.base import start_fields


@pytest.fixture
def run_ui():
    started = []

    def run(*arguments, **environment):
        started.append(UiProcess(*arguments, **environment))
        return started[-1]

    yield run
    for each in started:
        each.end()


def log_layers(folder, factor):
    """A run of one metric and one layer; the same but for what its values are times."""
    session = quark.start_run(project="p", storage_dir=folder)
    with session, quark.MetricsLogger(session) as metrics:
        for step in range(40):
            metrics.log("train/loss", factor * (1.0 + step), step=step)
            session.write(
                [
                    LayerSummaryRecord(
                        *start_fields(None), "head", "Linear", "activation", "forward", 0, 10,
                        step=step, norm=factor * (step + 1.0),
                    )
                ]
            )  # fmt: skip


def read_all(ui, run_id):
    """What the server shows of a run, of each kind of answer one figure."""
    path = f"api/runs/{run_id}"
    status, run = ui.get(path)
    assert status == 200, run
    rows = run["metrics"]["rows"]
    fields = run["metrics"]["fields"]
    found = {"high": dict(zip(fields, rows[0], strict=True))["high"]}
    found["created_at"] = run["run"]["created_at"]
    for name, parameters in (
        ("series", {"key": "train/loss"}),
        ("module", {"name": "head", "field": "norm"}),
    ):
        status, body = ui.get(f"{path}/{name}", **parameters)
        assert status == 200, body
        curve = decode_pack(body)[0]["curves"][0]
        found[name] = curve["high"][0]
    for name, parameters in (("map", {}), ("window", {"low": 10, "high": 20})):
        _, body = ui.get(f"{path}/grid", field="norm", summary="activation", **parameters)
        found[name] = float(decode_pack(body)[1]["base"][0])
    return found


@pytest.mark.long
def test_a_store_that_is_made_anew_is_read_and_nothing_of_the_one_before(
    tmp_path, run_ui, monkeypatch
):
    monkeypatch.setenv("QUARK_RUN_ID", "gone")
    log_plain_run(tmp_path)
    monkeypatch.setenv("QUARK_RUN_ID", "same")
    log_layers(tmp_path, 1.0)
    ui = run_ui(tmp_path)
    before = read_all(ui, "same")
    assert (before["high"], before["series"], before["map"]) == (40.0, 40.0, 3.0)
    assert {row["id"] for row in ui.get("api/runs")[1]["rows"]} == {"same", "gone"}
    analysis = ui.wait_for_analysis("same")
    _, run = ui.get("api/runs/same")
    cursor = run["cursor"]

    shutil.rmtree(tmp_path / ".quark")
    log_layers(tmp_path, 100.0)
    after = read_all(ui, "same")
    assert after.pop("created_at") > before.pop("created_at")
    assert after == pytest.approx({name: 100.0 * value for name, value in before.items()})
    assert ui.get("api/runs/gone")[0] == 404
    ui.wait_for("api/runs", lambda page: [row["id"] for row in page["rows"]] == ["same"])
    # Who goes on from what was there before is told to begin anew.
    status, body = ui.get("api/runs/same/changes", cursor=cursor, key="train/loss")
    assert (status, decode_pack(body)[0]["reset"]) == (200, True)
    found = ui.wait_for_analysis("same")
    assert found["at"] > analysis["at"]
    code, _, err = ui.end()
    assert (code, err) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("journal_only", ["", "1"])
def test_a_store_that_is_gone_is_told_of_and_shown_again_when_it_is_back(
    tmp_path, run_ui, journal_only, monkeypatch
):
    if journal_only:
        monkeypatch.setenv("QUARK_JOURNAL_ONLY", journal_only)
    run_id = log_plain_run(tmp_path)
    ui = run_ui(tmp_path)
    ui.wait_for_analysis(run_id)
    path = f"api/runs/{run_id}"
    answers = (
        ("api/runs", {}),
        ("api/names", {}),
        (path, {}),
        (f"{path}/analysis", {}),
        (f"{path}/series", {"key": "train/loss"}),
        (f"{path}/changes", {"cursor": ui.get(path)[1]["cursor"], "key": "train/loss"}),
        (f"{path}/grid", {"field": "norm"}),
        (f"{path}/module", {"name": "head"}),
        (f"{path}/events", {}),
        (f"{path}/artifacts", {}),
    )
    for asked, parameters in answers:
        assert ui.get(asked, **parameters)[0] in (200, 204), asked
    (tmp_path / ".quark").rename(tmp_path / "aside")
    for asked, parameters in answers:
        status, body = ui.get(asked, **parameters)
        assert status == 503, (asked, body)
        message = body["error"]["message"]
        assert str(tmp_path / ".quark") in message
        assert "is missing" in message
    assert ui.get("")[0] == 200  # the page itself
    (tmp_path / "aside").rename(tmp_path / ".quark")
    for asked, parameters in answers:
        assert ui.get(asked, **parameters)[0] in (200, 204), asked
    code, _, err = ui.end()
    assert (code, err) == (0, "")
