"""Rules of other distributions come by entry points; broken ones are left out."""

import sys
from importlib.metadata import EntryPoint

import pytest
from run_builder import RunBuilder, falling

from quark.analysis.analysis_context import Case
from quark.analysis.config import AnalyzerEngineConfig
from quark.analysis.engine import analyze_run
from quark.analysis.rule import Finding, Rule, Verdict
from quark.analysis.rules import registry


class SmallRate:
    rule_id = "small_rate"
    category = "optimization"

    def check(self, case):
        return Verdict(
            findings=(
                Finding(
                    culprit=None, severity="warning", title="t", fact="f", inference="i",
                    suggested_check="c", evidence=(), step=3,
                ),
            )
        )  # fmt: skip


class Failing(SmallRate):
    rule_id = "failing"

    def check(self, case):
        raise ZeroDivisionError("planted")


class Lying(SmallRate):
    rule_id = "lying"

    def check(self, case):
        return "all is well"


class Nameless:
    category = "optimization"


class OtherCategory(SmallRate):
    rule_id = "other"
    category = "weather"


class Taken(SmallRate):
    rule_id = "plateau"


def make_two():
    return [SmallRate(), Failing()]


def explode():
    raise SystemExit(3)


@pytest.fixture
def install(monkeypatch):
    """Installs entry points by the names of objects here."""

    def put(*names):
        points = [
            EntryPoint(name=name.lower(), value=f"{__name__}:{name}", group="quark.rules")
            for name in names
        ]
        monkeypatch.setattr(
            registry, "entry_points", lambda group: points if group == "quark.rules" else []
        )
        registry.list_rules.cache_clear()

    yield put
    monkeypatch.undo()
    registry.list_rules.cache_clear()


@pytest.mark.parametrize("name", ["SmallRate", "make_two"])
def test_a_class_or_a_function_gives_rules(install, name):
    install(name)
    result = analyze_run(RunBuilder().metric("train/loss", falling()).build())
    assert [(alert.rule_id, alert.step) for alert in result.alerts] == [("small_rate", 3)]


@pytest.mark.parametrize("name", ["Nameless", "OtherCategory", "Taken", "explode", "missing"])
def test_a_broken_plugin_is_left_out_with_a_warning(install, caplog, name):
    install(name, "SmallRate")
    ids = [rule.rule_id for rule in registry.list_rules()]
    assert ids == [rule.rule_id for rule in registry.BUILTIN_RULES] + ["small_rate"]
    assert f"test_rule_registry:{name} are ignored" in caplog.text


@pytest.mark.parametrize("name", ["Failing", "Lying"])
def test_a_rule_that_fails_silences_no_other(install, caplog, name):
    install(name, "SmallRate")
    result = analyze_run(RunBuilder().metric("train/loss", falling()).build())
    assert [alert.rule_id for alert in result.alerts] == ["small_rate"]
    assert result.verdicts[name.lower()].state == "no_data"
    assert "the rule failed" in result.verdicts[name.lower()].reason
    assert f"rule {name.lower()} failed" in caplog.text


def test_every_built_in_rule_is_a_rule_with_a_file_of_its_name():
    for rule in registry.BUILTIN_RULES:
        assert isinstance(rule, Rule)
        assert type(rule).__module__.rpartition(".")[2] == rule.rule_id
    config = AnalyzerEngineConfig(rules=tuple(rule.rule_id for rule in registry.BUILTIN_RULES))
    assert len(analyze_run(RunBuilder().build(), config).verdicts) == len(registry.BUILTIN_RULES)


def test_a_module_in_the_folder_of_the_rules_is_a_rule(tmp_path, monkeypatch):
    (tmp_path / "bad_luck.py").write_text(
        "from quark.analysis.rule import Verdict\n"
        "from quark.analysis.rule import BaseRule\n"
        "class BadLuck(BaseRule):\n"
        "    rule_id, category = 'bad_luck', 'optimization'\n"
        "    needs, data = 'it needs luck', ('luck',)\n"
        "    def judge(self, case):\n"
        "        return None\n"
    )
    package = registry.rules
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    try:
        found = registry.find_builtin_rules()
    finally:
        sys.modules.pop("quark.analysis.rules.bad_luck", None)
    builtin = [rule.rule_id for rule in registry.BUILTIN_RULES]
    assert [rule.rule_id for rule in found if rule.rule_id != "bad_luck"] == builtin
    (added,) = (rule for rule in found if rule.rule_id == "bad_luck")
    case = Case(RunBuilder().build(), AnalyzerEngineConfig())
    assert added.check(case).missing == ("luck",)


ASKED_WITH_TABLES = [rule for rule in registry.list_rules() if getattr(rule, "tables", ())]


@pytest.mark.parametrize("rule", ASKED_WITH_TABLES, ids=lambda rule: rule.rule_id)
def test_a_rule_that_is_not_asked_for_want_of_tables_would_have_had_no_data(rule):
    case = Case(RunBuilder().metric("train/loss", falling(40)).build(), AnalyzerEngineConfig())
    assert not case.run.has_any(rule.tables)
    assert (rule.judge(case), rule.find_limits(case)) == (None, ())
    verdict = rule.check(case)
    assert (verdict.state, verdict.reason, verdict.missing) == ("no_data", rule.needs, rule.data)
