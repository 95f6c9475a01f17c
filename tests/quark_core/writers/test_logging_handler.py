"""LoggingHandler: every log record becomes an event, and none ever harms who logs."""

import logging
import logging.config
import logging.handlers
import multiprocessing
import os
import queue
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.programs import run_code, run_threads
from tiers import count_examples

import quark
from quark import EventLogger, LoggingHandler
from quark_core.errors import SchemaValidationError
from quark_core.records.schema import validate_record
from quark_core.writers.events import LOG_EVENT_TYPE, default_severity


@pytest.fixture
def logger():
    """A logger of this test's own, which the root's handlers do not hear."""
    logger = logging.Logger("app.training")
    yield logger
    for handler in logger.handlers:
        handler.close()


@pytest.fixture
def handler(events, logger):
    handler = LoggingHandler(events)
    logger.addHandler(handler)
    return handler


def logged(events):
    return events.read(event_type=LOG_EVENT_TYPE)


def only(events):
    (record,) = logged(events)
    return record


def test_a_record_becomes_an_event(events, logger, handler):
    logger.warning("loss of %s at %d", "a", 3)

    event = only(events)
    assert validate_record(event) is event
    assert event.severity == "warning"
    assert (event.step, event.epoch, event.status) == (None, None, None)
    line = event.payload["line"]
    assert event.payload == {
        "level": "WARNING",
        "logger": "app.training",
        "message": "loss of a at 3",
        "file": __file__,
        "line": line,
        "function": "test_a_record_becomes_an_event",
    }
    assert default_severity(LOG_EVENT_TYPE) == "info"


@pytest.mark.parametrize(
    ("level", "severity"),
    [
        (1, "debug"),
        (logging.DEBUG, "debug"),
        (15, "debug"),
        (logging.INFO, "info"),
        (25, "info"),
        (logging.WARNING, "warning"),
        (logging.ERROR, "error"),
        (45, "error"),
        (logging.CRITICAL, "critical"),
        (99, "critical"),
    ],
)
def test_levels_in_between_map_down(events, logger, handler, level, severity):
    logger.log(level, "m")

    assert only(events).severity == severity
    assert only(events).payload["level"] == logging.getLevelName(level)


def test_records_below_the_level_are_left_out(events, logger):
    logger.addHandler(LoggingHandler(events, level="ERROR"))
    logger.warning("no")
    logger.error("yes")

    assert only(events).payload["message"] == "yes"


def test_the_time_is_that_of_the_record(events, handler):
    record = logging.makeLogRecord({"msg": "m", "created": 1_700_000_000.123456})
    handler.handle(record)

    assert only(events).timestamp == "2023-11-14T22:13:20.123456Z"


@pytest.mark.parametrize("created", [float("nan"), float("inf"), -1.0, 1e300, "soon", None])
def test_a_record_without_a_time_of_use_gets_one(events, handler, created):
    handler.handle(logging.makeLogRecord({"msg": "m", "created": created}))

    assert only(events).timestamp > "2024"


def test_exceptions_and_stacks(events, logger, handler):
    try:
        raise KeyError("lr")
    except KeyError:
        logger.exception("no such thing", stack_info=True)

    payload = only(events).payload
    assert payload["message"] == "no such thing"
    assert payload["exception"]["type"] == "KeyError"
    assert payload["exception"]["message"] == "'lr'"
    assert 'raise KeyError("lr")' in payload["exception"]["traceback"]
    assert payload["stack"].startswith("Stack (most recent call last):")


def test_exc_info_without_an_exception_is_none(events, logger, handler):
    logger.error("m", exc_info=True)

    assert "exception" not in only(events).payload


@pytest.mark.long
def test_extra_fields(events, logger, handler):
    logger.info(
        "m",
        extra={
            "step": 3,
            "epoch": np.int64(1),
            "lr": 0.1,
            "shape": (1, 2),
            "array": np.zeros(2),
            "handle": object(),
            "large": "x" * 100_000,
        },
    )

    event = only(events)
    assert (event.step, event.epoch) == (3, 1)
    assert event.payload["extra"] == {"lr": 0.1, "shape": [1, 2]}
    assert len(event.payload["notes"]) == 3
    for name in ("array", "handle", "large"):
        assert any(f"extra.{name} " in note for note in event.payload["notes"])


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 2**70])
def test_a_step_that_is_none_is_like_any_other_field(events, logger, handler, step):
    logger.info("m", extra={"step": step})

    assert only(events).step is None
    assert only(events).payload["extra"] == {"step": step if step != 2**70 else str(step)}


def test_thread_and_process_names_where_they_say_something(events, handler, logger):
    thread = threading.Thread(target=lambda: logger.info("m"), name="loader-3")
    thread.start()
    thread.join()

    assert only(events).payload["thread"] == "loader-3"
    assert "process" not in only(events).payload


def test_a_formatter_formats_the_message_and_nothing_else(events, logger, handler):
    handler.setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
    try:
        raise ValueError("v")
    except ValueError:
        logger.exception("it is %s", "bad", stack_info=True)

    payload = only(events).payload
    assert payload["message"] == "[ERROR] it is bad"
    assert "ValueError: v" in payload["exception"]["traceback"]


def test_another_handlers_record_is_left_as_it_is(events, handler):
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    record = logging.makeLogRecord({"msg": "m", "exc_text": "Traceback of elsewhere"})
    before = dict(vars(record))
    handler.handle(record)

    assert vars(record) == before
    assert only(events).payload["exception"] == {"traceback": "Traceback of elsewhere"}
    assert "extra" not in only(events).payload


class RaisingStr:
    def __str__(self):
        raise RuntimeError("no str")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("message", "args", "kept"),
    [
        ("%s %s", (1,), "%s %s"),
        ("%d", ("x",), "%d"),
        ("100 %", (1,), "100 %"),
        ("none", (1,), "none"),
        ("%(a)s", ({"b": 1},), "%(a)s"),
        ("%s", (RaisingStr(),), "%s"),
        (RaisingStr(), (), "<RaisingStr whose str raised RuntimeError>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_that_cannot_be_formatted_is_sent_as_its_template(
    events, logger, handler, capsys, message, args, kept
):
    logger.info(message, *args)

    payload = only(events).payload
    assert payload["message"] == kept
    assert len(payload["notes"]) == 1
    assert payload["notes"][0].startswith("the message could not be formatted: ")
    assert capsys.readouterr().err == ""


def test_a_formatter_that_fails_is_passed_by(events, logger, handler):
    handler.setFormatter(logging.Formatter("%(absent)s %(message)s"))
    logger.info("it is %s", "fine")

    assert only(events).payload["message"] == "it is fine"
    assert only(events).payload["notes"][0].startswith("the formatter failed: ")


def test_an_exception_whose_str_raises(events, logger, handler):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no str")

    logger.error("m", exc_info=Odd())

    found = only(events).payload["exception"]
    assert found["type"] == "Odd"
    assert found["message"] == "<Odd whose str raised RuntimeError>"


def test_long_texts_are_cut(events, logger, handler):
    try:
        raise ValueError("x" * 200_000)
    except ValueError:
        logger.exception("y" * 200_000)

    payload = only(events).payload
    assert payload["message"].startswith("yyy")
    assert payload["message"].endswith("…[cut]…")
    assert payload["exception"]["traceback"].startswith("…[cut]…")
    assert len(str(payload)) < 4 * 70_000


def test_lone_surrogates_are_replaced(events, logger, handler):
    logger.info("a\ud800b", extra={"x\ud800": "\ud800"})

    assert only(events).payload["message"] == "a?b"
    assert only(events).payload["extra"] == {"x?": "?"}


def test_what_quark_says_itself_is_not_sent(events):
    handler = LoggingHandler(events)
    for name in ("quark", "quark.delivery"):
        handler.handle(logging.makeLogRecord({"name": name, "msg": "own"}))
    for thread in ("quark-delivery", "quark-lane-mlflow"):
        handler.handle(
            logging.makeLogRecord({"name": "urllib3", "msg": "sent", "threadName": thread})
        )
    handler.handle(logging.makeLogRecord({"name": "quarkonium", "msg": "of others"}))

    assert only(events).payload["message"] == "of others"


def test_threads_of_quark_are_known_where_records_do_not_name_them(events, logger, handler):
    def log(name):
        def run():
            record = logging.makeLogRecord({"msg": name, "threadName": None})
            handler.handle(record)

        thread = threading.Thread(target=run, name=name)
        thread.start()
        thread.join()

    log("quark-lane-x")
    log("other")

    assert only(events).payload["message"] == "other"


def test_what_is_logged_while_a_record_is_made_into_an_event_is_dropped(events, logger, handler):
    class Talkative:
        def __str__(self):
            logger.info("inner %s", self)
            logger.info("inner")
            return "talk"

    logger.addHandler(LoggingHandler(events))
    logger.info("outer %s", Talkative())
    logger.info("after")

    messages = [event.payload["message"] for event in logged(events)]
    assert messages == ["outer talk"] * 2 + ["after"] * 2


def test_an_interrupt_is_passed_on_and_costs_no_later_record(events, logger, handler):
    class Interrupting:
        def __str__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logger.info("%s", Interrupting())
    logger.info("after")

    assert only(events).payload["message"] == "after"


def test_a_closed_event_logger_drops_everything_quietly(events, logger, handler, capsys):
    logger.info("before")
    events.close()
    logger.info("after")
    logger.info("%s", RaisingStr())

    assert only(events).payload["message"] == "before"
    assert capsys.readouterr().err == ""
    assert handler.handle(logging.makeLogRecord({})) is False


def test_an_ended_run_drops_everything_quietly(tmp_path, logger, capsys):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        logger.addHandler(LoggingHandler(session))
        logger.info("before")
    logger.info("after")

    (event,) = logged(EventLogger(quark.open_run(session.run_id, tmp_path)))
    assert event.payload["message"] == "before"
    assert capsys.readouterr().err == ""


def test_a_run_that_is_only_read_takes_nothing(tmp_path, logger):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    opened = quark.open_run(session.run_id, tmp_path)
    with pytest.raises(quark.InvalidRunStateError, match="opened for reading only"):
        LoggingHandler(opened)

    assert logged(EventLogger(opened)) == ()


def test_the_handler_closes_only_what_it_has_opened(session, events, logger):
    given, own = LoggingHandler(events), LoggingHandler(session.context)
    logger.addHandler(given)
    logger.addHandler(own)
    logger.info("m")
    given.close()
    own.close()
    own.close()
    logger.info("late")

    assert [event.payload["message"] for event in logged(events)] == ["m", "m"]
    events.log("open_still")


def test_a_run_without_a_store(tmp_path, logger):
    with quark.start_run(project="p", storage_dir=tmp_path, backends="none") as session:
        logger.addHandler(LoggingHandler(session))
        logger.info("m")


@pytest.mark.parametrize("events", [None, "session", 3, object(), logging.getLogger("x")])
def test_what_it_writes_to_is_checked(events):
    with pytest.raises(SchemaValidationError, match=r"^events must be .*EventLogger"):
        LoggingHandler(events)


@pytest.mark.parametrize("level", ["LOUD", None, 1.5, RaisingStr()], ids=["str", "None", "1.5", ""])
def test_the_level_is_checked(events, level):
    with pytest.raises(SchemaValidationError, match=r"^level must be "):
        LoggingHandler(events, level=level)


@pytest.mark.parametrize("key", ["()", "class"])
def test_configured_by_dict_config(session, events, key):
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"short": {"format": "> %(message)s"}},
            "handlers": {
                "run": {
                    key: "quark.LoggingHandler",
                    "events": session,
                    "level": "WARNING",
                    "formatter": "short",
                }
            },
            "loggers": {"configured.by.dict": {"handlers": ["run"], "level": "DEBUG"}},
        }
    )
    logger = logging.getLogger("configured.by.dict")
    try:
        logger.info("no")
        logger.error("yes")
    finally:
        logger.handlers[0].close()
        logger.handlers.clear()

    assert only(events).payload["message"] == "> yes"


def test_through_a_queue(events, logger):
    waiting = queue.SimpleQueue()
    logger.addHandler(logging.handlers.QueueHandler(waiting))
    listener = logging.handlers.QueueListener(waiting, LoggingHandler(events))
    listener.start()
    try:
        raise ValueError("v")
    except ValueError:
        logger.exception("loss of %s", "a", extra={"step": 2, "k": [1]})
    listener.stop()

    event = only(events)
    assert event.payload["message"].startswith("loss of a")
    assert "ValueError: v" in str(event.payload)
    assert event.step == 2
    assert event.payload["extra"] == {"k": [1]}


def test_filters_are_asked_and_may_change_the_record(events, logger, handler):
    def mark(record):
        record.who = "filter"
        return record.getMessage() != "no"

    handler.addFilter(mark)
    logger.info("no")
    logger.info("yes")

    assert only(events).payload["message"] == "yes"
    assert only(events).payload["extra"] == {"who": "filter"}


def test_captured_warnings(events):
    handler = LoggingHandler(events)
    logging.getLogger("py.warnings").addHandler(handler)
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old", FutureWarning, stacklevel=1)
    finally:
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").removeHandler(handler)

    assert "FutureWarning: old" in only(events).payload["message"]
    assert only(events).severity == "warning"


@pytest.mark.long
def test_many_threads(events, logger, handler):
    def work(number):
        for i in range(200):
            logger.info("%d-%d", number, i)

    run_threads(work, range(4))

    found = {event.payload["message"] for event in logged(events)}
    assert found == {f"{number}-{i}" for number in range(4) for i in range(200)}


def test_who_logs_does_not_wait_for_the_handlers_lock(events, logger, handler):
    held, release = threading.Event(), threading.Event()

    def hold():
        handler.acquire()
        held.set()
        release.wait()
        handler.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    logger.info("m")
    found = only(events)
    release.set()
    thread.join()

    assert found.payload["message"] == "m"


def _log_in_child(logger):
    logger.info("in the child")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_logs_into_the_run(tmp_path, logger):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        logger.addHandler(LoggingHandler(session))
        logger.info("in the parent")
        child = multiprocessing.get_context("fork").Process(target=_log_in_child, args=(logger,))
        child.start()
        child.join()
        assert child.exitcode == 0

    found = logged(EventLogger(quark.open_run(session.run_id, tmp_path)))
    assert {event.payload["message"] for event in found} == {"in the parent", "in the child"}
    assert len({event.writer_id for event in found}) == 2
    assert any("process" in event.payload for event in found)


@pytest.mark.long
def test_a_script_that_never_closes_its_handler(tmp_path):
    script = (
        "import logging, sys, quark;"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1]);"
        "logging.basicConfig(level='DEBUG', handlers=[quark.LoggingHandler(session)]);"
        "logging.getLogger('app').info('m'); print(session.run_id)"
    )
    done = run_code(script, tmp_path)
    assert done.stderr == ""
    opened = quark.open_run(done.stdout.strip(), tmp_path)

    assert [event.payload["message"] for event in logged(EventLogger(opened))] == ["m"]


@pytest.mark.long
def test_near_the_end_of_the_stack_nothing_is_raised_by_the_handler(events, logger, handler):
    record = logging.makeLogRecord({"name": "app", "msg": "deep", "threadName": "MainThread"})

    def descend():
        handler.emit(record)
        descend()

    with pytest.raises(RecursionError):
        descend()
    before = len(logged(events))
    logger.info("after")
    assert before > 0
    assert logged(events)[-1].payload["message"] == "after"


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=3)
    | st.builds(RaisingStr)
    | st.just(object()),
    lambda below: (
        st.lists(below, max_size=3)
        | st.tuples(below, below)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), below, max_size=3)
    ),
    max_leaves=6,
)
ATTRIBUTES = (
    "name msg args levelname levelno pathname lineno funcName created exc_info exc_text stack_info "
    "threadName processName step epoch any taskName"
).split()


@pytest.mark.long
@settings(max_examples=count_examples(300))
@given(
    st.dictionaries(st.sampled_from(ATTRIBUTES), anything, max_size=8),
    st.none() | st.sampled_from(["%(message)s", "%(asctime)s %(name)s %(message)s", "%(step)d"]),
)
def test_no_record_ever_raises(events, attributes, pattern):
    handler = LoggingHandler(events)
    handler.handleError = pytest.fail
    if pattern is not None:
        handler.setFormatter(logging.Formatter(pattern))
    record = logging.makeLogRecord(attributes)
    handler.handle(record)

    (found,) = events.flush()
    assert validate_record(found) is found
