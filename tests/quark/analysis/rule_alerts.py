"""What a rule finds in a run that a test has built."""

from quark.analysis.engine import analyze_run


def find(builder, rule_id):
    """The alerts of a rule, notes of documented thresholds among them."""
    return [alert for alert in analyze_run(builder.build()).alerts if alert.rule_id == rule_id]


def faults(builder, rule_id):
    """The alerts of a rule that are more than a note."""
    return [alert for alert in find(builder, rule_id) if alert.severity != "info"]


def verdict(builder, rule_id):
    """What a rule said, also where it was quiet."""
    return analyze_run(builder.build()).verdicts[rule_id]
