"""The page of one run: what it begins with, findings, events, artifacts, maps, modules."""

import numpy as np
import pytest
from page_client import wait_for_analysis

import quark
from quark_core.records import LayerSummaryRecord, ParameterDistributionRecord
from quark_core.records.base import start_fields

HOSTILE = '<img src=x onerror="alert(1)">'


def log_diverging(folder, **arguments):
    """A run whose loss explodes at step 150."""
    rng = np.random.default_rng(0)
    values = 0.2 + np.exp(-np.arange(240) / 25.0) + 0.02 * rng.standard_normal(240)
    values[150:] *= np.exp(np.arange(90) / 8.0)
    session = quark.start_run(project="p", storage_dir=folder, **arguments)
    with session, quark.MetricsLogger(session) as metrics:
        for step, value in enumerate(values.tolist()):
            metrics.log("train/loss", value, step=step)
    return session.run_id


def test_a_run_says_all_that_its_page_begins_with(plain):
    found = plain.json(f"/api/runs/{plain.run_id}")
    run = found["run"]
    assert (run["id"], run["name"], run["state"]) == (plain.run_id, "first", "completed")
    assert run["notes"] == "a note"
    assert run["resume"] == f"quark.resume_run(run_id={plain.run_id!r})"
    assert run["main"]["key"] == "train/loss"
    assert found["config"] == {"lr": 0.1, "steps": 100}
    assert found["environment"]["python"]["implementation"]
    assert found["ranks"] == [0]
    assert found["contents"]["event"] == 1
    assert found["contents"]["layer"] == 0
    assert found["progress"]["of"] == 100
    assert found["progress"]["eta_s"] is None
    assert found["delivery"]["lanes"][0]["backend"] == "embedded"
    assert found["delivery"]["unstored"] is None
    rows = [
        dict(zip(found["metrics"]["fields"], row, strict=True)) for row in found["metrics"]["rows"]
    ]
    assert [row["name"] for row in rows] == ["train/loss", "val/acc@1"]
    assert (rows[1]["key"], rows[1]["group"], rows[1]["count"]) == ("val/acc_x40_1", "val", 50)


def test_settings_say_what_gave_them_their_values(tmp_path, look):
    layers = quark.Layers()

    @layers.add(default=True)
    def base(c):
        c.lr, c["db.password"] = 0.1, "hunter2hunter2"

    config = layers.resolve(["lr=0.2"])
    with quark.start_run(project="p", storage_dir=tmp_path, config=config) as session:
        pass
    origins = look(tmp_path).json(f"/api/runs/{session.run_id}")["config_origins"]
    assert origins["lr"][0] == {"source": "command line", "place": None, "value": 0.2}
    assert (origins["lr"][1]["source"], origins["lr"][1]["value"]) == ("base", 0.1)
    assert [each["value"] for each in origins["db.password"]] == ["[redacted]"]


def test_metrics_are_sorted_as_people_count(tmp_path, look):
    names = ["system/cpu", "m10", "m2", "val/x", "a/b", "train/l10", "train/l9"]
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        for name in names:
            metrics.log(name, 1.0, step=0)
    rows = look(tmp_path).json(f"/api/runs/{session.run_id}")["metrics"]["rows"]
    shown = [row[1] for row in rows if not row[1].startswith("quark")]
    assert shown == ["train/l9", "train/l10", "val/x", "a/b", "m2", "m10", "system/cpu"]


def test_an_unknown_run_is_404_everywhere(plain):
    for run_id in ("nope", "..", ".hidden", "a b", "x" * 200, "%2e%2e", "é"):
        for tail in ("", "/analysis", "/series?key=a", "/changes?cursor=x", "/grid?field=norm",
                     "/module?name=a", "/events", "/artifacts"):  # fmt: skip
            answer = plain.http.get(f"/api/runs/{run_id}{tail}")
            assert answer.status_code in (400, 404), (run_id, tail, answer.text)
            if "cursor" not in tail:
                assert answer.status_code == 404


def test_an_analysis_is_computed_and_not_stored(tmp_path, look):
    run_id = log_diverging(tmp_path)
    client = look(tmp_path)
    first = client.json(f"/api/runs/{run_id}")["analysis"]
    assert first["state"] in ("computing", "computed")
    analysis = wait_for_analysis(client, run_id)
    assert analysis["state"] == "computed"
    assert analysis["findings"][0]["severity"] in ("error", "critical")
    assert {score["key"] for score in analysis["scores"]} >= {"overall", "runtime"}
    missing = {each["rule"] for each in analysis["rules"]["missing"]}
    assert "vanishing_gradients" in missing
    assert analysis["rules"]["count"] == analysis["rules"]["with_data"] + len(missing)
    assert analysis["phases"][0]["from"] == 0
    again = client.get(f"/api/runs/{run_id}/analysis", mark=analysis["mark"])
    assert again.status_code == 204
    # Nothing was written to the store.
    assert not quark.AnalyzerEngine(quark.open_run(run_id, tmp_path)).read_alerts()
    standing = client.json("/api/standings", run=run_id)["standings"][run_id]
    assert standing["health"]["known"] is True
    assert standing["worst"]["id"] == analysis["findings"][0]["id"]


def test_what_is_stored_is_shown_as_it_is(tmp_path, look):
    run_id = log_diverging(tmp_path)
    result = quark.AnalyzerEngine(quark.open_run(run_id, tmp_path)).analyze(store=True)
    quark.PhaseAnalyzer(quark.open_run(run_id, tmp_path)).analyze(store=True)
    analysis = look(tmp_path).json(f"/api/runs/{run_id}")["analysis"]
    assert analysis["state"] == "stored"
    assert analysis["generation"] == result.generation
    assert {finding["id"] for finding in analysis["findings"]} == {a.id for a in result.alerts}
    assert "First check: " in analysis["findings"][0]["fix"]
    assert analysis["phases"]


def test_evidence_can_be_read_as_a_curve_at_its_steps(tmp_path, look):
    run_id = log_diverging(tmp_path)
    client = look(tmp_path)
    drawn = 0
    for finding in wait_for_analysis(client, run_id)["findings"]:
        for evidence in finding["evidence"]:
            if evidence["read"] is None:
                continue
            head, columns = client.pack(f"/api/runs/{run_id}/{evidence['read']}")
            assert head["curves"]
            steps = columns["0.step"]
            if evidence["from"] is not None:
                assert steps.min() <= evidence["from"] <= steps.max()
            drawn += 1
    assert drawn


def test_evidence_of_layers_is_read_by_its_field(layered):
    path = f"/api/runs/{layered.run_id}/evidence"
    asked = {"kind": "layer", "name": "enc.1", "field": "norm", "summary": "gradient"}
    head, columns = layered.pack(path, **asked, low=5, high=9)
    (curve,) = head["curves"]
    assert (curve["name"], curve["field"], curve["unit"]) == ("enc.1", "norm", "step")
    assert columns["0.step"].tolist() == [5, 6, 7, 8, 9]
    assert columns["0.mean"].tolist() == [6, 7, 8, 9, 10]
    assert layered.pack(path, kind="layer", name="none", field="norm")[0]["curves"] == []
    for wrong, named in (
        ({}, "kind"),
        ({"kind": "metric"}, "kind"),
        ({"kind": "layer"}, "field"),
        ({"kind": "layer", "field": "nope"}, "field"),
        ({"kind": "layer", "name": "head", "field": "module_type"}, "field"),
        ({"kind": "telemetry", "name": "x", "field": "step_time_ms"}, "name"),
    ):
        assert named in layered.refused(400, path, **wrong)
    assert (
        layered.http.get("/api/runs/nope/evidence?kind=layer&name=head&field=norm").status_code
        == 404
    )


def test_consequences_stand_below_their_cause(tmp_path, look):
    run_id = log_diverging(tmp_path)
    findings = wait_for_analysis(look(tmp_path), run_id)["findings"]
    places = {finding["id"]: place for place, finding in enumerate(findings)}
    for finding in findings:
        cause = finding["caused_by"]
        if cause in places:
            assert places[cause] < places[finding["id"]]
            assert finding["depth"] == findings[places[cause]]["depth"] + 1
        else:
            assert finding["depth"] == 0


def test_a_run_that_is_too_short_has_a_health_that_is_not_known(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        metrics.log("train/loss", 1.0, step=0)
    analysis = wait_for_analysis(look(tmp_path), session.run_id)
    overall = analysis["scores"][0]
    assert overall["key"] == "overall"
    assert overall["known"] is False
    assert overall["reason"]


def log_layers(folder, *, steps=20, names=("enc.0", "enc.1", "head")):
    session = quark.start_run(project="p", storage_dir=folder)
    with session:
        for step in range(steps):
            session.write(
                [
                    LayerSummaryRecord(
                        *start_fields(None), name, "Linear", summary, direction, 0, 10, step=step,
                        norm=float("inf") if (name, step) == ("head", 3) else float(step + place),
                    )
                    for place, name in enumerate(names)
                    for summary, direction in (("activation", "forward"), ("gradient", "backward"))
                ]
                + [
                    ParameterDistributionRecord(
                        *start_fields(None), "head", "Linear", "head.weight", "weight", "value",
                        3, 3, step=step, bin_edges=(0.0, 1.0, 2.0), counts=(1, 2),
                    )
                ]
            )  # fmt: skip
    return session.run_id


@pytest.fixture(scope="session")
def layered_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    return folder, log_layers(folder)


@pytest.fixture
def layered(layered_store, look):
    client = look(layered_store[0])
    client.run_id = layered_store[1]
    return client


def test_a_map_of_layers(layered):
    head, columns = layered.pack(
        f"/api/runs/{layered.run_id}/grid", kind="layer", field="norm", summary="gradient"
    )
    assert [row["name"] for row in head["rows"]] == ["enc.0", "enc.1", "head"]
    assert [row["module"] for row in head["rows"]] == ["enc", "enc", ""]
    assert (head["exact"], head["bins"], head["steps"]) == (True, 20, [0, 19])
    cells = columns["cells"].reshape(3, 20)
    assert cells[0].tolist() == list(range(20))
    bad = columns["bad"].reshape(3, 20)
    assert bad.sum() == 1
    assert bad[2, 3] == 1
    assert columns["base"][0] == 2.0
    assert {(f["field"], f["summary"]) for f in head["fields"]} >= {
        ("norm", "gradient"),
        ("norm", "activation"),
    }
    # A window keeps the row's own beginning, that of the whole run.
    _, columns = layered.pack(
        f"/api/runs/{layered.run_id}/grid",
        field="norm",
        summary="gradient",
        low=10,
        high=15,
        bins=2,
    )
    assert columns["base"][0] == 2.0
    assert columns["cells"].max() == 17.0


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({}, "field"),
        ({"field": "nope"}, "field"),
        ({"field": "norm", "kind": "metric"}, "kind"),
        ({"field": "norm", "summary": "x"}, "summary"),
        ({"field": "norm", "rows": 1001}, "rows"),
        ({"field": "norm", "bins": 2001}, "bins"),
        ({"field": "norm", "low": "a"}, "low"),
    ],
)
def test_a_bad_parameter_of_a_map_is_named(layered, parameters, named):
    assert named in layered.refused(400, f"/api/runs/{layered.run_id}/grid", **parameters)


def test_a_module_s_fields_and_histograms(layered):
    head, columns = layered.pack(
        f"/api/runs/{layered.run_id}/module", kind="layer", name="head", field="norm", ridges=1
    )
    assert [(c["name"], c["field"], c["summary"]) for c in head["curves"]] == [
        ("head", "norm", "activation"),
        ("head", "norm", "gradient"),
    ]
    assert columns["0.step"].tolist() == list(range(20))
    assert head["curves"][0]["non_finite"] == 1
    assert len(head["ridges"]) == 20
    ridge = head["ridges"][0]
    assert (ridge["parameter"], ridge["type"], ridge["step"]) == ("head.weight", "value", 0)
    assert columns[ridge["edges"]].tolist() == [0.0, 1.0, 2.0]
    assert columns[ridge["counts"]].tolist() == [1.0, 2.0]
    head, _ = layered.pack(f"/api/runs/{layered.run_id}/module", name="no.such")
    assert head["curves"] == []
    path = f"/api/runs/{layered.run_id}/module"
    assert "name" in layered.refused(400, path)
    assert "field" in layered.refused(400, path, name="head", field="module_name")


def test_events_are_paged_from_the_end(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session:
        for number in range(25):
            session.add_log(
                f"line {number} {HOSTILE}", identifier="Error" if number == 7 else "Info"
            )
    client = look(tmp_path)
    path = f"/api/runs/{session.run_id}/events"
    page = client.json(path, type="user_log", limit=10)
    assert [event["message"].split()[1] for event in page["events"]] == [
        str(n) for n in range(15, 25)
    ]
    assert HOSTILE in page["events"][0]["message"]
    seen = page["events"]
    while page["next"] is not None:
        page = client.json(path, type="user_log", limit=10, before=page["next"])
        seen = page["events"] + seen
    assert [event["message"].split()[1] for event in seen] == [str(n) for n in range(25)]
    assert [e["message"].split()[1] for e in client.json(path, level="error")["events"]] == ["7"]
    found = client.json(path, text="LINE 1")["events"]
    assert {event["message"].split()[1] for event in found} == {"1", *map(str, range(10, 20))}
    assert "level" in client.refused(400, path, level="loud")
    assert "before" in client.refused(400, path, before="x")


PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 20
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'


def test_payloads_are_shown_in_a_sandbox_by_what_their_bytes_are(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    artifacts = quark.ArtifactStore(session)
    with session:
        artifacts.store("image", "p.html", PNG, payload_format="bytes")
        artifacts.store("page", "p.png", f"<!DOCTYPE html><script>{HOSTILE}", payload_format="text")
        artifacts.store("image", "v", SVG, payload_format="text", step=3)
        artifacts.store("note", "n/t", "plain\ntext", payload_format="text")
        artifacts.store("data", "j", {"a": 1})
        artifacts.store("blob", "b", b"\x00\x01MZ", payload_format="bytes")
    client = look(tmp_path)
    found = client.json(f"/api/runs/{session.run_id}/artifacts")
    assert found["count"] == 6
    types = {each["name"]: each["media_type"] for each in found["artifacts"]}
    assert types == {
        "p.html": "image/png",
        "p.png": "text/html",
        "v": "image/svg+xml",
        "n/t": "text/plain",
        "j": "application/json",
        "b": "application/octet-stream",
    }
    for each in found["artifacts"]:
        answer = client.http.get(f"/{each['url']}")
        assert answer.status_code == 200
        assert len(answer.content) == each["size_bytes"]
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("sandbox; default-src 'none'")
        assert "allow-scripts" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-type"].partition(";")[0] == types[each["name"]]
        is_shown = types[each["name"]].split(";")[0] in (
            "image/png",
            "image/svg+xml",
            "text/plain",
            "application/json",
        )
        kind = answer.headers["content-disposition"].partition(";")[0]
        assert kind == ("inline" if is_shown else "attachment")
        saved = client.http.get(f"/{each['url']}?download=1")
        assert saved.headers["content-disposition"].startswith("attachment")
    page = client.json(f"/api/runs/{session.run_id}/artifacts", limit=4)
    rest = client.json(f"/api/runs/{session.run_id}/artifacts", limit=4, after=page["next"])
    assert (len(page["artifacts"]), len(rest["artifacts"]), rest["next"]) == (4, 2, None)
    named = client.json(f"/api/runs/{session.run_id}/artifacts", text="N/T")["artifacts"]
    assert [each["name"] for each in named] == ["n/t"]


@pytest.mark.parametrize("name", ["0" * 64, "..%2f..%2f.quark%2fquark.db", "A" * 64, "x", "0" * 63])
def test_a_payload_is_asked_for_by_the_hash_of_one_of_the_run_s_artifacts(plain, name):
    assert plain.http.get(f"/artifacts/{plain.run_id}/{name}").status_code == 404
    assert plain.http.get(f"/artifacts/nope/{name}").status_code == 404


def test_a_payload_of_another_run_is_not_given_away(tmp_path, look):
    shas = []
    for number in range(2):
        session = quark.start_run(project="p", storage_dir=tmp_path)
        with session:
            stored = quark.ArtifactStore(session).store("t", "a", f"text {number}")
            shas.append((session.run_id, stored.sha256))
    client = look(tmp_path)
    (first, sha), (second, other) = shas
    assert client.http.get(f"/artifacts/{first}/{sha}").status_code == 200
    assert client.http.get(f"/artifacts/{first}/{other}").status_code == 404
    assert client.http.get(f"/artifacts/{second}/{sha}").status_code == 404


def test_4000_metrics(tmp_path, look):
    session = quark.start_run(project="p", storage_dir=tmp_path)
    with session, quark.MetricsLogger(session) as metrics:
        for number in range(4_000):
            metrics.log(f"layer{number % 40}/m{number}", float(number), step=0)
    client = look(tmp_path)
    rows = client.json(f"/api/runs/{session.run_id}")["metrics"]["rows"]
    assert len([row for row in rows if row[1].startswith("layer")]) == 4_000
    keys = [row[0] for row in rows[:50]]
    head, _ = client.pack(f"/api/runs/{session.run_id}/series", key=keys)
    assert [curve["key"] for curve in head["curves"]] == keys
