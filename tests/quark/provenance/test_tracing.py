"""`quark.trace`: the function is what it was, and the run knows which one it had."""

from __future__ import annotations

import ast
import asyncio
import logging
import pickle
import subprocess
import sys
import textwrap

import pytest

import quark
from quark.provenance import tracing
from quark.provenance.code_fingerprints import fingerprint_module
from quark.provenance.traces import digest_function, read_traces
from quark.provenance.tracing import (
    LEVEL_BYTECODE,
    LEVEL_TEXT,
    TracedFunction,
    describe_function,
    list_traced,
)
from quark_core.records.query import Query


@pytest.fixture(autouse=True)
def _nothing_traced(monkeypatch):
    monkeypatch.setattr(tracing, "_traced", {})
    monkeypatch.setattr(tracing, "_state", {"is_full": False})


@pytest.fixture
def read_outputs(tmp_path):
    def read_outputs(session, key):
        rows = quark.open_run(session.run_id, tmp_path).open_run.read("fingerprint", Query())
        return [
            digest
            for subject, name, digest in zip(
                rows["subject"], rows["key"], rows["digest"], strict=True
            )
            if (subject, name) == ("output", key)
        ]

    return read_outputs


@quark.trace("module-level", output=True)
def double(x):
    return 2 * x


def plain(x):
    return x


def find_traced(name):
    (found,) = [each for each in list_traced() if each.name == name]
    return found


def test_without_output_the_function_itself_is_returned():
    assert quark.trace("a")(plain) is plain
    assert quark.trace(plain) is plain
    assert quark.trace()(plain) is plain
    assert {each.name for each in list_traced()} == {"a", "plain"}


def test_a_name_is_the_qualified_one_by_default():
    class Net:
        @quark.trace
        def forward(self):
            return 1

        @quark.trace()
        @staticmethod
        def fixed():
            return 2

        @classmethod
        @quark.trace("made")
        def make(cls):
            return cls().forward()

    assert (Net().forward(), Net.fixed(), Net.make()) == (1, 2, 1)
    own = "test_a_name_is_the_qualified_one_by_default.Net"
    assert {each.name for each in list_traced()} == {f"{own}.forward", f"{own}.fixed", "made"}


def test_results_pass_whatever_is_returned_or_raised(tmp_path, read_outputs):
    marker = object()

    @quark.trace("give", output=True)
    def give(what):
        if isinstance(what, BaseException):
            raise what
        return what

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        for value in (None, marker, [1], float("nan")):
            assert give(value) is value
        for error in (ValueError("mine"), KeyboardInterrupt(), GeneratorExit()):
            with pytest.raises(type(error)) as caught:
                give(error)
            assert caught.value is error
    assert len(read_outputs(session, "give")) == 4
    assert give(marker) is marker


def test_outputs_of_calls_0_to_3_and_at_powers_of_two_are_noted_for_each_run(
    tmp_path, read_outputs
):
    sessions = []
    for _ in range(2):
        with quark.start_run(project="p", storage_dir=tmp_path) as session:
            for step in range(20):
                double(step)
        sessions.append(session)
    first, second = (read_outputs(session, "module-level") for session in sessions)
    assert len(first) == 4 + 3  # 0, 1, 2, 3, 4, 8, 16
    assert first == second
    assert len(set(first)) == len(first)


def test_what_is_inspected_and_called_before(tmp_path, read_outputs):
    calls = []

    @quark.trace("seeded", output=True, init=lambda: calls.append("init"), inspect=lambda r: r[:1])
    def seeded(x):
        calls.append("call")
        return [1, x]

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        seeded(2)
        seeded(3)
    assert calls == ["init", "call"] * 2
    assert len(set(read_outputs(session, "seeded"))) == 1


def test_what_fails_of_ours_costs_one_warning(tmp_path, caplog, read_outputs):
    def fail(_result):
        raise RuntimeError("inspect is broken")

    @quark.trace("broken", output=True, inspect=fail)
    def broken(x):
        return x

    with (
        caplog.at_level(logging.WARNING, "quark"),
        quark.start_run(project="p", storage_dir=tmp_path) as session,
    ):
        assert [broken(x) for x in range(4)] == [0, 1, 2, 3]
    told = [each for each in caplog.records if "inspect is broken" in each.getMessage()]
    assert len(told) == 1
    assert read_outputs(session, "broken") == []


def test_what_init_raises_passes_as_part_of_the_function():
    def fail():
        raise ValueError("no seed")

    traced = quark.trace("a", init=fail)(plain)
    with pytest.raises(ValueError, match="no seed"):
        traced(1)


def test_coroutines_and_generators_stay_what_they_are(tmp_path, read_outputs):
    @quark.trace("later", output=True)
    async def later(x):
        await asyncio.sleep(0)
        return x

    @quark.trace("many", output=True)
    def many(n):
        got = []
        try:
            for each in range(n):
                try:
                    got.append((yield each))
                except KeyError:
                    got.append("caught")
        finally:
            got.append("closed")
        return got

    @quark.trace("stream", output=True)
    async def stream(n):
        for each in range(n):
            yield each

    async def collect():
        return [each async for each in stream(3)]

    def delegate():
        return (yield from many(3))

    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        assert asyncio.run(later(5)) == 5
        assert list(many(3)) == [0, 1, 2]
        assert asyncio.run(collect()) == [0, 1, 2]
        talk = many(4)
        assert (next(talk), talk.send("a"), talk.throw(KeyError()), next(talk)) == (0, 1, 2, 3)
        with pytest.raises(StopIteration) as end:
            next(talk)
        assert end.value.value == ["a", "caught", None, None, "closed"]
        left = many(3)
        next(left)
        left.close()
        assert list(delegate()) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            bad = many(2)
            next(bad)
            bad.throw(ZeroDivisionError())
    assert len(read_outputs(session, "later")) == 1
    assert len(read_outputs(session, "many")) >= 4
    assert read_outputs(session, "stream") == []


def test_a_traced_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(double)) is double


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"name": "sources"}, "sources"),
        ({"name": "a", "output": "yes"}, "output"),
        ({"name": "a", "init": 3, "output": True}, "init"),
        ({"name": "a", "inspect": 3, "output": True}, "inspect"),
        ({"name": "a", "inspect": len}, "output=True"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, named):
    with pytest.raises(quark.SchemaValidationError, match=named):
        quark.trace(**arguments)(plain)


def test_what_is_no_function_is_refused():
    class Net:
        pass

    for target in (Net, 3):
        with pytest.raises(quark.SchemaValidationError, match="functions"):
            quark.trace("a")(target)


def test_a_function_of_c_or_with_odd_attributes_is_traced_as_far_as_it_goes():
    class Odd:
        def __call__(self, x):
            return x

        def __getattr__(self, name):
            raise RuntimeError(name)

    assert quark.trace("c")(len) is len
    odd = Odd()
    quark.trace("odd")(odd)
    assert describe_function(find_traced("c")) is None


def test_too_many_functions_are_bounded_and_told_once(monkeypatch, caplog):
    monkeypatch.setattr(tracing, "_MOST_FUNCTIONS", 3)
    with caplog.at_level(logging.WARNING, "quark"):
        for number in range(6):
            quark.trace(f"f{number}")(plain)
    assert len(list_traced()) == 3
    assert len(caplog.records) == 1


def test_code_without_a_text_is_known_by_its_bytecode():
    def make(text):
        namespace = {"quark": quark}
        exec(text, namespace)
        digest, level, metadata = describe_function(find_traced("made"))
        assert (level, "text" in metadata) == (LEVEL_BYTECODE, False)
        return digest

    text = "@quark.trace('made')\ndef made(x):\n    return {1, 2, x}, 'a'\n"
    assert make(text) == make("\n\n" + text) != make(text.replace("2", "3"))


def test_a_text_is_kept_whole_and_without_secrets(tmp_path):
    token = "ghp_" + "a1B2" * 9
    path = tmp_path / "secret_module.py"
    path.write_text(
        f"import quark\n@quark.trace('s')\ndef s(x):\n    t = '{token}'\n"
        "    return (x,\n        t\n    )\n"
    )
    exec(compile(path.read_text(), str(path), "exec"), {})
    digest, level, metadata = describe_function(find_traced("s"))
    assert (level, metadata["is_redacted"]) == (LEVEL_TEXT, True)
    assert token not in metadata["text"]
    assert metadata["text"].endswith("    )\n")
    assert "text" not in describe_function(find_traced("s"), with_text=False)[2]
    assert describe_function(find_traced("s"), with_text=False)[0] == digest


def test_the_digest_of_a_text_is_that_of_the_function_in_its_module():
    module = textwrap.dedent('''
        import quark as q
        from quark import trace as t

        @q.trace("one")
        def one(n):
            """Doc."""
            return one(n - 1) if n else 0

        class Net:
            class Inner:
                @t("two", init=lambda: seed(1))
                @no_grad
                def two(self, x: int = 3):
                    text = """
              indented
                    """
                    return self.__hidden + text

            @staticmethod
            @t
            async def three(*a, b=4): return [i async for i in a]
    ''')
    units = {unit.name: unit for unit in fingerprint_module(module).units}
    lines = module.splitlines(keepends=True)
    for name in ("one", "Net.Inner.two", "Net.three"):
        unit = units[name]
        text = "".join(lines[unit.first_line - 1 : unit.last_line])
        assert digest_function(text, name, ("q", "t")) == (unit.digest, "syntax")
        if name == "one":
            other = text.replace("one", "another")
            assert digest_function(other, "another", ("q",)) == (unit.digest, "syntax")


@pytest.mark.parametrize(
    ("text", "qualname"),
    [
        ("f = quark.trace('a')(lambda x: x + 1)\n", "<lambda>"),
        ("    x = (lambda a: a)\n", "A.<lambda>"),
        ("def f(:\n", "f"),
        ("", "f"),
        ("def f(): pass\ndef g(): pass\n", "f"),
        ("def f(): pass\n", "1.é.class.f"),
        ("def f(): pass\n", "a." * 5000 + "f"),
        ("\x00", "f"),
    ],
)
def test_any_text_and_name_of_a_stranger_has_a_digest(text, qualname):
    digest, level = digest_function(text, qualname, ("quark", "not a name", "class", "é"))
    assert level in ("syntax", "bytes")
    assert len(digest) == 32


def test_a_run_has_the_functions_that_were_there_and_those_that_came(tmp_path):
    quark.trace("early")(plain)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:

        @quark.trace("late")
        def late(x):
            # Why.
            return x

    reader = quark.open_run(session.run_id, tmp_path).open_run.reader
    traces = read_traces(reader, session.run_id)
    assert set(traces) == {"early", "late"}
    late_trace = traces["late"]
    assert late_trace.level == "syntax"
    assert "# Why." in (late_trace.text or "")
    assert late_trace.qualname.endswith(".<locals>.late")


def test_nothing_is_parsed_where_a_run_goes_on(tmp_path, monkeypatch):
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *a, **k: parsed.append(a) or parse(*a, **k))
    quark.trace("one")(plain)
    with quark.start_run(project="p", storage_dir=tmp_path):
        double(1)
    assert parsed == []


def test_digests_alone_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("QUARK_SOURCES", "digest")
    quark.trace("one")(plain)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        pass
    reader = quark.open_run(session.run_id, tmp_path).open_run.reader
    trace = read_traces(reader, session.run_id)["one"]
    assert (trace.level, trace.text) == ("text", None)


def test_in_a_process_of_its_own_a_traced_function_works_too(tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing
            import quark

            @quark.trace("work", output=True)
            def work(x):
                return x * x

            if __name__ == "__main__":
                with quark.start_run(project="p"):
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        print(pool.map(work, [1, 2, 3]))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip().splitlines()[-1] == "[1, 4, 9]", done.stderr


def test_what_is_noted_of_a_function_names_no_text_twice(tmp_path):
    known = TracedFunction("a", "m", "a", plain.__code__)
    assert describe_function(known) == describe_function(known)
