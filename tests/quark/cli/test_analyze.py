"""`quark analyze` says what is wrong with a run, and its exit status serves CI."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
from calls import read_json, squeeze
from diagnosed_runs import overfit, succeed

import quark
from quark.analysis.phases import PhaseAnalyzer
from quark.analysis.rule import Verdict
from quark.analysis.rules import registry
from quark.analysis.rules.registry import DOCUMENTED_RULES, list_rules

LEVELS = ["info", "warning", "error", "critical"]
SCRIPT = str(Path(sys.executable).with_name("quark"))


@pytest.fixture
def store(tmp_path, log_run):
    log_run(tmp_path, "over-1", values=overfit(), name="overfit")
    log_run(tmp_path, "good-1", values=succeed(), name="good")
    return tmp_path


@pytest.fixture(scope="module")
def exploded(tmp_path_factory):
    """A real training whose rate becomes far too large at step 100: one cause, many symptoms."""
    torch = pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("exploded")
    torch.manual_seed(0)
    data = torch.randn(1000, 10)
    labels = (data.sum(1) > 0).long()
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 24),
        torch.nn.ReLU(),
        torch.nn.Linear(24, 24),
        torch.nn.ReLU(),
        torch.nn.Linear(24, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with quark.start_run(project="vision", storage_dir=root) as session:
        metrics = quark.MetricsLogger(session)
        with quark.watch(session, model, optimizer, every_n_steps=5, telemetry=False) as watch:
            for step in range(200):
                if step == 100:
                    optimizer.param_groups[0]["lr"] = 30.0
                watch.step(step)
                rows = torch.randint(0, 1000, (32,))
                loss = torch.nn.functional.cross_entropy(model(data[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                metrics.log("train/loss", loss.item(), step=step)
    return root, session.run_id


def analyze_json(invoke, *arguments):
    return read_json(invoke("analyze", *arguments, "--json"))


@pytest.mark.long
def test_a_healthy_run_has_scores_and_no_alerts(invoke, store):
    result = invoke("analyze", "good", "-d", store)
    assert result.exit_code == 0
    text = result.stdout
    assert text.startswith("vision good-1  good  completed\n")
    assert re.search(r"^overall +100 .*healthy", text, re.M)
    assert re.search(r"^generalization +100 .*healthy", text, re.M)
    assert re.search(r"^No alerts: \d+ of \d+ checks ran and found no problem\.$", text, re.M)
    assert "Stored with the run as analysis 1." in text


@pytest.mark.long
def test_what_is_not_known_is_no_health(invoke, store):
    text = invoke("analyze", "good", "-d", store).stdout
    line = re.search(r"^representation.*$", text, re.M)[0]
    assert "not known" in line
    assert "0 of 1 checks ran" in line
    assert "healthy" not in line
    found = analyze_json(invoke, "good", "-d", store, "--no-store")
    silent = {name: rule for name, rule in found["rules"].items() if rule["state"] == "no_data"}
    assert "activation_collapse" in silent
    part = text[text.index("rules lack data") :]
    assert "quark.watch(session, model, optimizer)" in part
    for name, rule in silent.items():
        assert name in part
        assert rule["reason"] in squeeze(part)


@pytest.mark.long
def test_an_alert_is_told_whole(invoke, store):
    (alert,) = analyze_json(invoke, "over", "-d", store, "--no-store")["alerts"]
    assert alert["rule_id"] == "overfitting_onset"
    text = invoke("analyze", "over", "-d", store, columns=80).stdout
    said = squeeze(text)
    assert "1 alert " in said
    assert f"1 {alert['severity'].upper()} {alert['title']} overfitting_onset" in said
    assert f"where {alert['culprit']}, from step {alert['step']} on" in said
    for label, value in (
        ("fact", alert["fact"]),
        ("inference", alert["inference"]),
        ("check", alert["suggested_check"]),
    ):
        assert f"{label} {squeeze(value)}" in said
    first = alert["evidence"][0]
    assert f"evidence {first['kind']} {first['source']}" in said
    assert f"threshold {first['threshold_value']:.3g}" in said
    assert f"observed {first['observed_value']:.3g}" in said
    assert re.search(rf"▲ step {alert['step']}\b", text)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.long
def test_the_curve_of_a_layer_is_drawn(invoke, exploded):
    root, run_id = exploded
    text = invoke("analyze", run_id, "-d", root, "--no-store").stdout
    assert re.search(r"gradient norm of [\w.]+, .* on a log scale", text)
    assert "train/loss, " in text


@pytest.mark.long
def test_consequences_stand_under_their_cause(invoke, exploded):
    root, run_id = exploded
    alerts = analyze_json(invoke, run_id, "-d", root, "--no-store")["alerts"]
    text = invoke("analyze", run_id, "-d", root, "--no-store").stdout
    heads = list(
        re.finditer(r"^( *)(\d+)  (INFO|WARNING|ERROR|CRITICAL)  (.+?)  (\w+)$", text, re.M)
    )
    assert [int(head[2]) for head in heads] == list(range(1, len(alerts) + 1))
    titles = {alert["alert_id"]: alert["title"] for alert in alerts}
    linked = [alert for alert in alerts if (alert["metadata"] or {}).get("caused_by")]
    assert linked
    for alert in linked:
        cause = titles[alert["metadata"]["caused_by"]]
        places = {head[4]: head for head in heads}
        above, below = places[cause], places[alert["title"]]
        assert above.start() < below.start()
        assert len(above[1]) < len(below[1])
        assert f"alert {above[2]}, {cause}" in text[below.start() :]
        leads = re.search(r"effect +alert ([\d, ]+)", text[above.start() :])[1]
        assert below[2] in leads.split(", ")
    roots = [head[3].lower() for head in heads if len(head[1]) == 1]
    ranks = [LEVELS.index(name) for name in roots]
    # A root stands where the worst of what follows from it would.
    worst = max(LEVELS.index(alert["severity"]) for alert in alerts)
    assert ranks[0] == worst or linked


@pytest.mark.long
def test_phases_are_one_bar_with_a_legend(invoke, store):
    phases = analyze_json(invoke, "over", "-d", store, "--no-store")["phases"]
    assert phases
    for columns in (80, 120):
        lines = invoke("analyze", "over", "-d", store, columns=columns).stdout.splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith("Phases"))
        assert f"steps {phases[0]['step_start']} to {phases[-1]['step_end']}" in lines[at]
        assert len(lines[at + 1]) <= columns
        marks = [mark for mark in lines[at + 1] if mark.isdigit()]
        assert marks == [str(number + 1) for number in range(len(phases))]
        legend = squeeze(" ".join(lines[at + 2 :]))
        for number, phase in enumerate(phases, start=1):
            assert f"{number} {phase['display_name']} step" in legend


@pytest.mark.long
def test_json_is_one_document_and_nothing_else(quark_command, store):
    done = quark_command("analyze", "over", "-d", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = read_json(done)
    with quark.open_run("over-1", store) as session:
        result = quark.AnalyzerEngine(session).analyze()
        phases = PhaseAnalyzer(session).read_phases()
    assert {*found} == {*result.to_dict(), "phases", "phase_notes"}
    assert (found["generation"], found["stored"]) == (1, True)
    assert [alert["alert_id"] for alert in found["alerts"]] == [a.id for a in result.alerts]
    assert [phase["phase_name"] for phase in found["phases"]] == [p.phase_name for p in phases]


class Talking:
    rule_id = "talking"
    category = "optimization"

    def check(self, case):
        print("a rule talks")
        return Verdict(reason="all is well")


@pytest.mark.long
def test_what_a_rule_prints_is_no_part_of_the_json(invoke, store, monkeypatch):
    monkeypatch.setattr(registry, "list_rules", lambda: (*registry.BUILTIN_RULES, Talking()))
    done = invoke("analyze", "over", "-d", store, "--json")
    assert json.loads(done.stdout)["rules"]["talking"]["reason"] == "all is well"
    assert "a rule talks" in done.stderr


@pytest.mark.long
def test_a_later_analysis_replaces_the_earlier_one(invoke, store):
    for number in (1, 2):
        assert analyze_json(invoke, "over", "-d", store)["generation"] == number
    engine = quark.AnalyzerEngine(quark.open_run("over-1", store))
    assert len(engine.read_alerts()) == 1
    assert len(engine.read_health_scores()) == 5


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-store"],
        ["--rule", "overfitting_onset"],
        ["--explain", "all"],
        ["--no-store", "--json"],
    ],
)
def test_nothing_is_stored_where_it_should_not_be(invoke, store, arguments):
    assert invoke("analyze", "over", "-d", store, *arguments).exit_code == 0
    session = quark.open_run("over-1", store)
    assert quark.AnalyzerEngine(session).read_health_scores() == ()
    assert PhaseAnalyzer(session).read_phases() == ()
    assert "alerts:" not in invoke("show", "over", "-d", store).stdout


@pytest.mark.long
def test_what_nobody_could_judge_is_shown_as_not_known(invoke, store):
    text = invoke("analyze", "good", "-d", store).stdout
    assert re.search(r"^runtime +- .* not known", text, re.M)
    assert not re.search(r"(?<!quark\.)watch", text)  # the status, and not the call
    found = {
        score["score_key"]: score
        for score in analyze_json(invoke, "good", "-d", store)["health_scores"]
    }
    assert (found["runtime"]["known"], found["optimization"]["known"]) == (False, True)
    assert found["runtime"]["unknown_reason"] == "no rule had the data it needs"
    assert "health not known: representation, runtime" in invoke(
        "show", "good", "-d", store
    ).stdout.replace("\n", " ")
    compared = invoke("compare", "good", "over", "-d", store).stdout
    assert "runtime" not in compared.partition("Health")[2].partition("\n")[0]


@pytest.mark.sampled
@pytest.mark.parametrize("level", LEVELS[1:])
def test_the_exit_status_says_whether_an_alert_is_as_severe(invoke, store, level):
    for run in ("over", "good"):
        found = analyze_json(invoke, run, "-d", store)
        worst = max((LEVELS.index(a["severity"]) for a in found["alerts"]), default=-1)
        assert (worst >= 0) is (run == "over")
        expected = 3 if worst >= LEVELS.index(level) else 0
        for extra in ([], ["--json"], ["--explain", "all"]):
            result = invoke("analyze", run, "-d", store, "--fail-on", level, *extra)
            assert result.exit_code == expected
        assert invoke("analyze", run, "-d", store).exit_code == 0


@pytest.mark.long
def test_only_the_rules_that_were_asked_for_look(invoke, store):
    found = analyze_json(invoke, "over", "-d", store, "--rule", "plateau", "--rule", "divergence")
    assert {*found["rules"]} == {"plateau", "divergence"}
    assert (found["alerts"], found["stored"]) == ([], False)


@pytest.mark.long
def test_the_absolute_mode_asks_the_documented_rules(invoke, store):
    found = analyze_json(invoke, "over", "-d", store, "--mode", "absolute")
    assert {*found["rules"]} == {*DOCUMENTED_RULES}


@pytest.mark.parametrize("rule_id", ["healthy_baseline", "broken_off"])
def test_an_alert_that_no_rule_raises_is_explained_too(invoke, store, rule_id):
    text = invoke("analyze", "good", "-d", store, "--explain", rule_id).stdout
    assert text.startswith("How to fix it\n")


def test_each_alert_names_the_command_that_says_how_to_fix_it(invoke, store):
    text = invoke("analyze", "over", "-d", store).stdout
    assert re.search(r"^ +fix +quark analyze \w+(-\w+)* --explain overfitting_onset$", text, re.M)


@pytest.mark.long
def test_a_rule_says_why_it_fired_or_did_not(invoke, store):
    text = invoke("analyze", "over", "-d", store, "--explain", "overfitting_onset").stdout
    assert text.startswith("overfitting_onset  fired\n")
    assert "The validation loss was best at step" in text
    assert "How to fix it" in text
    assert "early stopping" in text
    text = invoke("analyze", "good", "-d", store, "--explain", "all").stdout
    assert "How to fix it" not in text
    heads = re.findall(r"^(\w+)  (fired|quiet|lacks data)$", text, re.M)
    assert [name for name, _ in heads] == [rule.rule_id for rule in list_rules()]
    states = dict(heads)
    assert (states["overfitting_onset"], states["activation_collapse"]) == (
        "quiet",
        "lacks data",
    )
    assert re.search(r"^  observed \S+, threshold \S+$", text, re.M)
    assert re.search(r"^  missing: ", text, re.M)


@pytest.mark.sampled
@pytest.mark.parametrize("values", [{}, {"loss": [1.0]}, {"loss": [math.nan] * 3}, {"x": [1e308]}])
def test_a_run_with_next_to_nothing_is_analyzed(invoke, tmp_path, log_run, values):
    log_run(tmp_path, "bare", values=values)
    result = invoke("analyze", "bare", "-d", tmp_path, columns=80)
    assert result.exit_code == 0
    assert "No phases: " in result.stdout or "Phases" in result.stdout
    assert analyze_json(invoke, "bare", "-d", tmp_path)["run_id"] == "bare"


@pytest.mark.long
def test_without_any_data_nothing_is_claimed(invoke, tmp_path, log_run):
    log_run(tmp_path, "bare")
    text = invoke("analyze", "bare", "-d", tmp_path).stdout
    assert "No alerts, but no rule had the data that it needs." in text
    assert "healthy" not in text
    assert re.search(r"^overall +- .*not known", text, re.M)


@pytest.mark.long
def test_a_run_that_goes_on_is_analyzed_from_outside(quark_command, tmp_path, start):
    with start(tmp_path, "live") as session:
        metrics = quark.MetricsLogger(session)
        for key, points in overfit().items():
            for step, value in enumerate(points):
                metrics.log(key, value, step=step)
        session.flush("stored")
        done = quark_command("analyze", "live", "-d", tmp_path, "--fail-on", "warning")
        assert (done.returncode, done.stderr) == (3, "")
        assert "running (so far)" in done.stdout
        assert "Stored with the run as analysis 1." in done.stdout
        metrics.log("train/loss", 0.5, step=999)
    assert len(quark.AnalyzerEngine(quark.open_run("live", tmp_path)).read_alerts()) == 1


@pytest.mark.long
def test_a_store_that_keeps_no_outputs_is_told(quark_command, tmp_path, log_run, monkeypatch):
    monkeypatch.setenv("QUARK_JOURNAL_ONLY", "1")
    log_run(tmp_path, "over-1", values=overfit())
    done = quark_command("analyze", "over", "-d", tmp_path, "--fail-on", "warning")
    assert done.returncode == 3
    assert "Overfitting" in done.stdout
    found = json.loads(quark_command("analyze", "over", "-d", tmp_path, "--json").stdout)
    if found["stored"]:
        assert "Stored with the run" in done.stdout
    else:
        assert squeeze(f"Not stored: {found['refusal'].rstrip('.')}.") in squeeze(done.stdout)
    assert found["phases"]


@pytest.mark.long
def test_show_has_a_line_on_the_stored_analysis(invoke, store):
    for run in ("over", "good"):
        invoke("analyze", run, "-d", store)
    severity = analyze_json(invoke, "over", "-d", store)["alerts"][0]["severity"]
    unknown = "health not known: representation, runtime"
    line = f"alerts: 1 (1 {severity}); {unknown} (analysis 2): quark analyze over-1"
    assert line in invoke("show", "over", "-d", store).stdout.splitlines()
    line = f"alerts: none; {unknown} (analysis 1): quark analyze good-1"
    assert line in invoke("show", "good", "-d", store).stdout.splitlines()
    assert json.loads(invoke("show", "good", "-d", store, "--json").stdout)["run"]["id"] == "good-1"


@pytest.mark.long
def test_against_a_run_that_went_well(store, exploded, invoke):
    against = ("--against", "good-1", "--json", "--no-store")
    result = invoke("analyze", "good-1", "-d", store, *against)
    assert json.loads(result.stdout)["rules"]["healthy_baseline"]["state"] == "quiet"
    root, run_id = exploded
    with pytest.raises(quark.SchemaValidationError, match="is not healthy"):
        invoke("analyze", run_id, "-d", root, "--against", run_id, "--no-store")


@pytest.mark.long
def test_against_a_run_that_there_is_not(store, invoke):
    with pytest.raises(quark.RunNotFoundError):
        invoke("analyze", "over-1", "-d", store, "--against", "nobody")
