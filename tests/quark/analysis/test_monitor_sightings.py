import pytest

from quark.analysis.monitor_state import AlertDeduplicator, Pace, describe_alert
from quark_core.records import AlertRecord
from quark_core.records.json_object import JsonObject


def alert(rule="plateau", severity="warning", culprit="train/loss", name=None, **metadata):
    return AlertRecord(
        "r", "", 0, 0, 0, 0, rule, "optimization", severity, "Title", "Summary.", "Fact.",
        "Inference.", step=7, culprit=culprit, metadata=JsonObject(metadata),
        alert_id=name or f"{rule}-{culprit}",
    )  # fmt: skip


def told(alerts):
    return [(item.rule_id, item.severity) for item in alerts]


@pytest.mark.parametrize("severity", ["info", "warning", "error"])
def test_a_finding_is_raised_when_two_looks_have_it(severity):
    sightings = AlertDeduplicator()
    assert sightings.update([alert(severity=severity)]) == []
    assert told(sightings.update([alert(severity=severity)])) == [("plateau", severity)]
    assert sightings.update([alert(severity=severity)]) == []


def test_what_recovers_between_two_looks_is_not_raised():
    sightings = AlertDeduplicator()
    for _ in range(5):
        assert sightings.update([alert()]) == []
        assert sightings.update([]) == []
    assert sightings.raised == ()


def test_critical_is_raised_at_once_and_once():
    sightings = AlertDeduplicator()
    assert told(sightings.update([alert(severity="critical")])) == [("plateau", "critical")]
    assert sightings.update([alert(severity="critical")]) == []


def test_a_higher_severity_is_news_once_it_lasts_and_a_lower_one_is_not():
    sightings = AlertDeduplicator()
    sightings.update([alert(severity="warning")])
    assert told(sightings.update([alert(severity="error")])) == [("plateau", "warning")]
    assert told(sightings.update([alert(severity="error")])) == [("plateau", "error")]
    assert sightings.update([alert(severity="warning")]) == []
    assert told(sightings.update([alert(severity="critical")])) == [("plateau", "critical")]


def test_a_rising_alert_keeps_its_id_and_stands_once_among_the_raised():
    sightings = AlertDeduplicator()
    sightings.update([alert(name="first")])
    sightings.update([alert(name="second")])
    assert [item.id for item in sightings.raised] == ["second"]
    sightings.update([alert(name="third", severity="critical")])
    assert [(item.id, item.severity) for item in sightings.raised] == [("second", "critical")]


def test_other_culprits_are_other_findings():
    sightings = AlertDeduplicator()
    sightings.update([alert(culprit="a")])
    assert sightings.update([alert(culprit="b")]) == []
    assert len(sightings.update([alert(culprit="a"), alert(culprit="b")])) == 1


def test_a_limit_of_the_user_is_a_finding_of_its_own():
    sightings = AlertDeduplicator()
    both = [alert(severity="critical"), alert(severity="critical", hard_limit=True, name="limit")]
    assert [item.id for item in sightings.update(both)] == ["plateau-train/loss", "limit"]


def test_the_last_look_waits_for_nothing():
    sightings = AlertDeduplicator()
    assert told(sightings.update([alert()], last=True)) == [("plateau", "warning")]


def test_what_stayed_away_for_long_is_news_again():
    sightings = AlertDeduplicator()
    sightings.update([alert(severity="critical")])
    for _ in range(9):
        sightings.update([])
    assert sightings.update([alert(severity="critical")]) == []
    for _ in range(10):
        sightings.update([])
    assert len(sightings.update([alert(severity="critical", name="again")])) == 1
    assert [item.id for item in sightings.raised] == ["plateau-train/loss", "again"]


def test_links_lead_to_raised_alerts_only_and_to_the_ids_that_these_have():
    sightings = AlertDeduplicator()
    cause = alert("divergence", "critical", name="c1", consequences=["e1"])
    effect = alert("plateau", name="e1", caused_by="c1")
    (raised,) = sightings.update([cause, effect])
    assert raised.id == "c1"
    assert "consequences" not in raised.metadata
    later = alert("divergence", "critical", name="c2", consequences=["e2"])
    (raised,) = sightings.update([later, alert("plateau", name="e2", caused_by="c2")])
    assert raised.id == "e2"
    assert raised.metadata["caused_by"] == "c1"


def test_of_a_cause_and_its_effect_the_worse_comes_first():
    sightings = AlertDeduplicator()
    cause = alert("divergence", "critical", name="c", consequences=["e"])
    effect = alert("plateau", "critical", name="e", caused_by="c")
    raised = sightings.update([cause, effect])
    assert [item.id for item in raised] == ["c", "e"]
    assert raised[0].metadata["consequences"] == ["e"]


def test_an_alert_is_described_for_its_event():
    told = describe_alert(alert())
    assert told["rule_id"] == "plateau"
    assert told["alert_id"] == "plateau-train/loss"
    assert told["first_step"] == 7
    assert told["culprit"] == "train/loss"


def test_looks_come_as_often_as_they_may():
    pace = Pace(0.5, 0.05)
    assert pace.is_due(100.0)
    pace.note(100.0, 0.001)
    assert not pace.is_due(100.4)
    assert pace.is_due(100.5)


def test_dear_looks_come_later():
    pace = Pace(0.5, 0.05)
    pace.note(100.0, 1.0)
    assert pace.spacing_s == pytest.approx(20.0)
    assert not pace.is_due(119.9)
    assert pace.is_due(120.0)
