"""The notifier: each notice once, not too many, and whatever a target does costs nobody else."""

import json
import logging
import threading
import time

import pytest

from quark.notifications.notices import (
    DEFAULT_CHOICE,
    Notice,
    NoticeChoice,
    parse_choice,
)
from quark.notifications.notifier import FileLedger, Notifier, Pacing
from quark.notifications.targets import parse_targets, sign_notice, verify_webhook
from quark_core.errors import SchemaValidationError

ALL = NoticeChoice("info", frozenset(("failed", "lost", "interrupted", "finished")))
END_S = 30.0


def make_notice(number=0, *, rule=None, severity="error", run="r1", title="too high"):
    return Notice(
        key=f"alert {run} {number}",
        kind="alert",
        event=rule or f"rule{number}",
        severity=severity,
        title=title,
        text="the gradient grows",
        run_id=run,
        project="p",
        at="2026-01-01T00:00:00Z",
    )


def make_notifier(tmp_path, targets, *, choice=ALL, **pacing):
    ledger = FileLedger(tmp_path / "told.jsonl")
    return Notifier(parse_targets(targets, "notify"), choice, ledger, Pacing(**pacing))


def tell_all(notifier, *notices):
    for notice in notices:
        notifier.tell(notice)
    notifier.close(END_S)


def test_a_function_gets_each_notice_once_and_in_order(tmp_path):
    got = []
    notices = [make_notice(number) for number in range(5)]
    tell_all(make_notifier(tmp_path, got.append), *notices, *notices)

    assert got == notices


def test_what_was_told_is_not_told_again_by_another_notifier(tmp_path):
    got = []
    for _ in range(2):
        tell_all(make_notifier(tmp_path, got.append), make_notice())

    assert len(got) == 1


def test_a_line_that_a_killed_process_has_cut_off_costs_nothing_else(tmp_path):
    path = tmp_path / "told.jsonl"
    assert FileLedger(path).note("first")
    with path.open("a") as file:
        file.write('"seco')
    assert FileLedger(path).note("third")

    again = FileLedger(path)
    assert [again.note(key) for key in ("first", "third", "second")] == [False, False, True]


def test_who_is_killed_between_the_note_and_the_sending_tells_it_never_rather_than_twice(tmp_path):
    got = []
    assert FileLedger(tmp_path / "told.jsonl").note(make_notice().key)  # and dies here
    tell_all(make_notifier(tmp_path, got.append), make_notice())

    assert got == []


def test_a_ledger_that_cannot_be_written_tells_once_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    got = []
    ledger = FileLedger(tmp_path / "file" / "told.jsonl")
    notifier = Notifier(parse_targets(got.append, "notify"), ALL, ledger)
    tell_all(notifier, make_notice(), make_notice())

    assert len(got) == 1


def test_notices_of_one_rule_of_a_run_are_held_back_and_told_together_at_the_end(tmp_path):
    got = []
    notices = [make_notice(number, rule="dead", title=f"layer {number}") for number in range(4)]
    other = make_notice(9, rule="dead", run="r2")
    tell_all(make_notifier(tmp_path, got.append), *notices, other)

    assert [each.kind for each in got] == ["alert", "alert", "digest"]
    assert got[:2] == [notices[0], other]
    assert got[2].title == "3 notices were held back"
    assert got[2].text == "error: layer 1\nerror: layer 2\nerror: layer 3"
    tell_all(make_notifier(tmp_path, got.append), *notices)
    assert len(got) == 3


def test_no_more_are_told_in_an_hour_than_the_bound_and_one_digest(tmp_path):
    got = []
    notices = [make_notice(number) for number in range(50)]
    tell_all(make_notifier(tmp_path, got.append, per_hour=5), *notices)

    assert got[:5] == notices[:5]
    (digest,) = got[5:]
    assert digest.title == "45 notices were held back"
    assert digest.text.endswith("and 25 more")


def test_what_is_held_back_is_told_when_its_time_has_come_while_the_run_goes_on(tmp_path):
    got, told = [], threading.Event()

    def take(notice):
        got.append(notice)
        if len(got) == 2:
            told.set()

    notifier = make_notifier(tmp_path, take, topic_s=0.2)
    first, second = (make_notice(number, rule="same") for number in range(2))
    notifier.tell(first)
    notifier.tell(second)
    assert told.wait(60)
    notifier.close(END_S)
    assert got == [first, second]


def test_what_is_not_chosen_is_not_told(tmp_path):
    got = []
    end = {"kind": "end", "severity": "error"}
    notices = [
        make_notice(number, severity=each) for number, each in enumerate(("warning", "error"))
    ]
    notices += [
        Notice(key=event, event=event, title=event, text="", **end)
        for event in ("failed", "lost", "interrupted", "finished")
    ]
    tell_all(make_notifier(tmp_path, got.append, choice=DEFAULT_CHOICE), *notices)

    assert [each.event for each in got] == ["rule1", "failed", "lost"]


@pytest.mark.parametrize(
    ("given", "severity", "ends"),
    [
        (None, "error", {"failed", "lost"}),
        ("critical", "critical", set()),
        ("warning, finished", "warning", {"finished"}),
        (["failed", "interrupted"], None, {"failed", "interrupted"}),
    ],
)
def test_what_is_told_is_chosen_by_words(given, severity, ends):
    assert parse_choice(given, "notify_on") == NoticeChoice(severity, frozenset(ends))


@pytest.mark.parametrize("given", ["loud", "error, warning", "", [], ["failed", 3]])
def test_words_that_choose_nothing_are_refused(given):
    with pytest.raises(SchemaValidationError, match=r"^notify_on must be"):
        parse_choice(given, "notify_on")


def test_a_signed_webhook_is_what_the_receiver_can_verify(tmp_path, receive):
    receiver = receive()
    url = f"webhook+http://{receiver.address}/hooks/secret-path?token=1"
    tell_all(make_notifier(tmp_path, url), make_notice(title="too high"))

    ((path, headers, body),) = receiver.requests
    secret = b"a secret that both have"
    assert path == "/hooks/secret-path?token=1"
    assert verify_webhook(headers, body, secret)
    assert not verify_webhook(headers, body + b" ", secret)
    assert not verify_webhook(headers, body, b"another secret altogether")
    assert not verify_webhook({**headers, "Quark-Timestamp": "1"}, body, secret)
    assert not verify_webhook({}, body, secret)
    sent = json.loads(body)
    assert (sent["version"], sent["kind"], sent["event"], sent["title"]) == (
        1,
        "alert",
        "rule0",
        "too high",
    )
    assert headers["Quark-Delivery"] == sent["id"]


def test_a_webhook_that_is_sent_again_later_is_refused():
    body, headers = sign_notice(make_notice(), b"secret", moment_s=int(time.time()) - 301)
    assert not verify_webhook(headers, body, b"secret")
    assert verify_webhook(headers, body, b"secret", window_s=400)


def test_apprise_tells_its_services(tmp_path, receive):
    receiver = receive()
    tell_all(
        make_notifier(tmp_path, f"json://{receiver.address}/"), make_notice(severity="critical")
    )

    ((_, _, body),) = receiver.requests
    sent = json.loads(body)
    assert (sent["title"], sent["message"]) == ("too high", "the gradient grows")
    assert sent["type"] == "failure"


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", ["json", "webhook+http"])
def test_a_notice_is_sent_on_to_nobody(scheme, tmp_path, receive):
    asked, other = receive(307), receive()
    asked.location = f"http://{other.address}/"
    tell_all(make_notifier(tmp_path, f"{scheme}://{asked.address}/"), make_notice())
    assert asked.requests
    assert other.requests == []


def test_mail_is_sent_by_a_mail_server(tmp_path):
    from aiosmtpd.controller import Controller
    from aiosmtpd.handlers import Message

    got = []

    class Keep(Message):
        def handle_message(self, message):
            got.append(message)

    class Mail(Controller):
        def _trigger_server(self):
            # A port that is taken by binding 0 is known only once it listens.
            self.port = self.server.sockets[0].getsockname()[1]
            super()._trigger_server()

    controller = Mail(Keep(), hostname="127.0.0.1", port=0)
    controller.start()
    try:
        url = f"mailto://127.0.0.1:{controller.port}?from=quark@example.org&to=me@example.org&mode=insecure"
        tell_all(make_notifier(tmp_path, url), make_notice())
    finally:
        controller.stop()
    (message,) = got
    assert message["Subject"] == "too high"
    assert "me@example.org" in message["To"]


@pytest.mark.parametrize("form", ["webhook+http://{}/", "json://{}/"])
def test_a_target_that_fails_is_asked_again_until_it_takes_a_notice_once(tmp_path, receive, form):
    receiver = receive(500, 503, 200)
    notifier = make_notifier(tmp_path, form.format(receiver.address), pauses_s=(0.0, 0.0, 0.0))
    notifier.tell(make_notice())
    receiver.wait(3)
    notifier.close(END_S)

    assert len(receiver.requests) == 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("status", "form"), [(404, "webhook+http"), (302, "webhook+http"), (403, "json")]
)
def test_a_target_that_refuses_is_not_asked_again_and_said_once(
    tmp_path, receive, caplog, status, form
):
    receiver = receive(status)
    url = f"{form}://{receiver.address}/very-secret-path"
    tell_all(make_notifier(tmp_path, url, pauses_s=(0.0,)), make_notice(1), make_notice(2))

    assert len(receiver.requests) == 2
    (record,) = caplog.records
    assert f"notifications by {form}://…: a notification was not accepted" in record.getMessage()
    assert f"HTTP {status}" in record.getMessage()
    assert "very-secret-path" not in caplog.text
    assert receiver.address not in caplog.text


def test_a_target_that_hangs_is_left_after_its_time_and_not_asked_twice(tmp_path, receive, caplog):
    hanging, sound = receive(None), receive()
    urls = [f"webhook+http://{each.address}/" for each in (hanging, sound)]
    notifier = make_notifier(tmp_path, urls, timeout_s=1.0, pauses_s=(0.0,))
    for number in range(2):
        notifier.tell(make_notice(number))
    sound.wait(2)
    hanging.wait(2)
    notifier.close(END_S)

    assert len(hanging.requests) == 2
    assert "no answer" in caplog.text


def test_a_function_that_hangs_keeps_nobody_and_its_end_is_waited_for_no_longer_than_said(tmp_path):
    release, entered, taken, got = threading.Event(), threading.Event(), threading.Event(), []

    def hang(_):
        entered.set()
        release.wait(60)

    def take(notice):
        got.append(notice)
        taken.set()

    notifier = make_notifier(tmp_path, [hang, take])
    notifier.tell(make_notice())
    assert entered.wait(60)
    assert taken.wait(60)
    notifier.close(0.05)
    release.set()
    assert got == [make_notice()]


def test_a_function_that_raises_is_said_once_and_called_for_the_next(tmp_path, caplog):
    called = []

    def fail(notice):
        called.append(notice)
        raise SystemExit(3)

    tell_all(make_notifier(tmp_path, fail), make_notice(1), make_notice(2))

    assert len(called) == 2
    assert "SystemExit" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", "notify must be a URL"),
        (["slack://ok/a/b", 3], r"notify\[1\] must be a URL or a function"),
        (17, "notify must be a URL, a function"),
        (["json://127.0.0.1/"] * 21, "at most 20"),
    ],
)
def test_what_is_no_target_is_refused_without_being_shown(given, said):
    with pytest.raises(SchemaValidationError, match=said) as caught:
        parse_targets(given, "notify")
    assert "TIiajkdn" not in str(caught.value)


@pytest.mark.parametrize("secret", ["", "short"])
def test_a_webhook_needs_a_secret(monkeypatch, tmp_path, secret):
    monkeypatch.setenv("QUARK_NOTIFY_SECRET", secret)
    with pytest.raises(SchemaValidationError, match="QUARK_NOTIFY_SECRET_FILE"):
        parse_targets("webhook+https://example.org/", "notify")
    monkeypatch.delenv("QUARK_NOTIFY_SECRET")
    (tmp_path / "secret").write_text("a secret of a file\n")
    monkeypatch.setenv("QUARK_NOTIFY_SECRET_FILE", str(tmp_path / "secret"))
    assert len(parse_targets("webhook+https://example.org/", "notify")) == 1


def test_an_address_stands_in_no_text_of_what_has_it(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    url = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    targets = parse_targets(url, "notify")
    notifier = Notifier(targets, ALL, FileLedger(tmp_path / "told"))

    shown = f"{targets!r} {notifier!r} {targets[0].name}"
    assert "slack://…" in shown
    assert "TIiajkdn" not in shown
    # An address that Apprise does not know, whatever it says of that.
    tell_all(make_notifier(tmp_path, "nosuch://TIiajkdnlazkcOXrIdevi7FQ"), make_notice())
    assert "nosuch://…" in caplog.text
    assert "TIiajkdn" not in caplog.text
