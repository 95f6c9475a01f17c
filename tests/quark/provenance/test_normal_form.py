"""What the normal form leaves out, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quark.provenance.code_fingerprints import fingerprint_module
from quark.provenance.normal_form import (
    LEVEL_BYTES,
    LEVEL_SYNTAX,
    digest_source,
    parse_source,
)

_GOLDEN = Path(__file__).with_name("normal_form_golden.json")

EQUAL = {
    "comments and layout": ("x=1", "# why\nx = (\n    1  # one\n)\n"),
    "quotes and prefixes": ("x = 'a'", 'x = u"a"'),
    "texts that stand together": ("x = 'a' 'b'", "x = 'ab'"),
    "a text with nothing to fill in": ("x = f'ab'", "x = 'ab'"),
    "parts of a text to fill in": ("x = f'a' f'{b}' 'c' f'd'", "x = f'a{b}cd'"),
    "an empty format": ("x = f'{b:}'", "x = f'{b}'"),
    "numbers as they are written": ("x = 0xFF + 1_000", "x = 255 + 1000"),
    "parentheses of del": ("del (a, b)", "del a, b"),
    "pass": ("if a:\n    b()\nelse:\n    pass", "if a:\n    pass\n    b()"),
    "docstrings": ('def f():\n    "says"\n    return 1', "def f():\n    return 1"),
    "a docstring alone": ('class A:\n    "says"', "class A: pass"),
    "dots alone": ("class A: ...", "class A: pass"),
    "order of imports": (
        "import b\nfrom a import d, c",
        "from a import c\nfrom a import d\nimport b",
    ),
    "imports of one package": ("import a.b\nimport a.c", "import a.c, a.b"),
    "locals": (
        "def f(a):\n    b = a\n    c = b\n    return b - c",
        "def f(a):\n    x = a\n    y = x\n    return x - y",
    ),
    "variables of comprehensions": ("x = [i for i in y if i]", "x = [z for z in y if z]"),
    "a comprehension in a class": (
        "class A:\n    n = 3\n    x = [i for i in range(n)]",
        "class A:\n    n = 3\n    x = [j for j in range(n)]",
    ),
    "except as in a module": (
        "try: a()\nexcept E as e: print(e)",
        "try: a()\nexcept E as error: print(error)",
    ),
    "two handlers, each by itself": (
        "def f():\n try: a()\n except A as e: b(e)\n except B as e: c(e)",
        "def f():\n try: a()\n except A as e: b(e)\n except B as other: c(other)",
    ),
    "captures of patterns": (
        "def f(p):\n match p:\n  case [a, *b]: return a, b\n  case {'k': c, **d}: return c, d",
        "def f(p):\n match p:\n  case [q, *r]: return q, r\n  case {'k': s, **t}: return s, t",
    ),
    "a walrus in a comprehension": (
        "def f(y):\n return [a for b in y if (a := b)]",
        "def f(y):\n return [n for m in y if (n := m)]",
    ),
    "closures": (
        "def f():\n a = 0\n def g():\n  nonlocal a\n  a += 1\n return g",
        "def f():\n n = 0\n def count():\n  nonlocal n\n  n += 1\n return count",
    ),
    "imports in functions": (
        "def f():\n import numpy\n return numpy.a",
        "def f():\n import numpy as np\n return np.a",
    ),
    "a local that is deleted": ("def f():\n a = 1\n del a", "def f():\n b = 1\n del b"),
    "a local called like a function that looks at locals": (
        "def f():\n dir = 1\n b = 2\n return dir + b",
        "def f():\n a = 1\n c = 2\n return a + c",
    ),
    "annotations of functions": (
        "def f(a: int, *b: str) -> None:\n    c: int = a\n    d: str\n    return c",
        "def f(a, *b):\n    c = a\n    return c",
    ),
    "a function that wraps": (
        "def d(f):\n @wraps(f)\n def inner(): return f()\n return inner",
        "def d(f):\n @functools.wraps(f)\n def wrapper(): return f()\n return wrapper",
    ),
    "trace": (
        "import quark\n@quark.trace('step', output=True)\ndef f(a: int): return a",
        "import quark\n\n\ndef f(a): return a",
    ),
    "identifiers": ("def f():\n ﬁ = 1\n return fi", "def f():\n fi = 1\n return ﬁ"),
    "ends of lines": ("x = '''a\nb'''\n", "x = '''a\r\nb'''\r\n"),
}
EQUAL["a function that wraps"] = (
    EQUAL["a function that wraps"][0],
    EQUAL["a function that wraps"][0].replace("inner", "wrapper"),
)

DIFFERENT = {
    "1 and True": ("x = 1", "x = True"),
    "1 and 1.0": ("x = 1", "x = 1.0"),
    "0.0 and -0.0": ("x = 0.0", "x = -0.0"),
    "0.0 and 0j": ("x = 0.0", "x = 0j"),
    "text and bytes": ("x = ''", "x = b''"),
    "None and its name": ("x = None", "x = 'None'"),
    "dots and None": ("x = ...", "x = None"),
    "large numbers": (f"x = 0x{'F' * 5000}", f"x = 0x{'F' * 4999}E"),
    "numbers that are not": ("x = 1e999", "x = -1e999"),
    "a text that looks like more": ("x = 'a', 'b'", "x = \"a', 'b\""),
    "a text to fill in and a text": ("x = f'{a}'", "x = '{a}'"),
    "a conversion": ("x = f'{a!r}'", "x = f'{a!s}'"),
    "a format": ("x = f'{a:.2f}'", "x = f'{a:.3f}'"),
    "the name in a text": (
        "def f():\n a = 1\n return f'{a=}'",
        "def f():\n b = 1\n return f'{b=}'",
    ),
    "two locals swapped": (
        "def f():\n a = g(); b = h()\n return a - b",
        "def f():\n a = g(); b = h()\n return b - a",
    ),
    "one local becomes another": (
        "def f(x):\n a = x; b = a\n return a",
        "def f(x):\n a = x; b = a\n return b",
    ),
    "a local becomes a global": ("def f():\n a = 1\n return a", "def f():\n b = 1\n return a"),
    "a global becomes a local": ("def f():\n global a\n a = 1", "def f():\n a = 1"),
    "nonlocal": (
        "def f():\n a = 0\n def g():\n  nonlocal a\n  a = 1\n g()\n return a",
        "def f():\n a = 0\n def g():\n  a = 1\n g()\n return a",
    ),
    "who captures": (
        "def f():\n a = b = 0\n def g(): return a\n return g, b",
        "def f():\n a = b = 0\n def g(): return b\n return g, b",
    ),
    "a parameter of an outer function and a global": (
        "def f(x):\n def g():\n  global x\n  return x\n return g",
        "def f(x):\n def g():\n  return x\n return g",
    ),
    "names of parameters": ("def f(a): return a", "def f(b): return b"),
    "a default": ("def f(a=1): pass", "def f(a=2): pass"),
    "which parameter has the default": ("def f(a, *, b=1, c): pass", "def f(a, *, b, c=1): pass"),
    "kinds of parameters": ("def f(a, /, b): pass", "def f(a, b, /): pass"),
    "by keyword only": ("def f(a, *, b): pass", "def f(a, *b): pass"),
    "async": ("async def f(): pass", "def f(): pass"),
    "an async comprehension": (
        "async def f(x): return [a async for a in x]",
        "async def f(x): return [a for a in x]",
    ),
    "a star of except": (
        "try: a()\nexcept* E: b()",
        "try: a()\nexcept E: b()",
    ),
    "an inner handler deletes the outer one's variable": (
        "def f():\n try: a()\n except A as e:\n  try: b()\n  except B as e: pass\n  raise e",
        "def f():\n try: a()\n except A as e:\n  try: b()\n  except B as d: pass\n  raise e",
    ),
    "a handler's variable that a function takes": (
        "try: a()\nexcept E as e:\n def f(): return e",
        "try: a()\nexcept E as d:\n def f(): return d",
    ),
    "names in a class": ("class A:\n    a = 1", "class A:\n    b = 1"),
    "names in a class in a function": (
        "def f():\n class A:\n  a = 1\n return A",
        "def f():\n class A:\n  b = 1\n return A",
    ),
    "names in a module": ("a = 1", "b = 1"),
    "the name of a class in a function": (
        "def f():\n class A: pass\n return A",
        "def f():\n class B: pass\n return B",
    ),
    "a name that a decorator sees": (
        "def f():\n @register\n def a(): pass",
        "def f():\n @register\n def b(): pass",
    ),
    "annotations that a decorator sees": ("@d\ndef f(a: int): pass", "@d\ndef f(a: str): pass"),
    "annotations of a class": ("class A:\n    a: int", "class A:\n    a: str"),
    "names under locals()": (
        "def f():\n a = 1\n return locals()",
        "def f():\n b = 1\n return locals()",
    ),
    "names under eval, handed on": (
        "def f(x):\n a = 1\n return [eval(i) for i in x]",
        "def f(x):\n b = 1\n return [eval(i) for i in x]",
    ),
    "names that a table reads": (
        "def f(t):\n a = 1\n return t.query('x > @a')",
        "def f(t):\n b = 1\n return t.query('x > @a')",
    ),
    "order of imports where one hides another": (
        "from a import x\nfrom b import x",
        "from b import x\nfrom a import x",
    ),
    "order of imports with a star": (
        "from a import *\nfrom b import x",
        "from b import x\nfrom a import *",
    ),
    "imports that something stands between": (
        "import a\na.b()\nimport c",
        "import a\nimport c\na.b()",
    ),
    "what a dotted import binds": ("import a.b", "import a.b as a"),
    "how far an import goes up": ("from . import a", "from .. import a"),
    "order of statements": ("a()\nb()", "b()\na()"),
    "order of keywords": ("f(a=g(), b=h())", "f(b=h(), a=g())"),
    "a decorator": ("@torch.no_grad()\ndef f(): pass", "def f(): pass"),
    "order of decorators": ("@a\n@b\ndef f(): pass", "@b\n@a\ndef f(): pass"),
    "another trace": (
        "import other\n@other.trace('a')\ndef f(): pass",
        "import other\ndef f(): pass",
    ),
    "what trace calls first": (
        "import quark\n@quark.trace('a', init=lambda: seed(1))\ndef f(): pass",
        "import quark\n@quark.trace('a', init=lambda: seed(2))\ndef f(): pass",
    ),
    "a docstring that is read": (
        '"usage: --lr=0.1"\nimport docopt\ndocopt.docopt(__doc__)',
        '"usage: --lr=0.2"\nimport docopt\ndocopt.docopt(__doc__)',
    ),
    "an else of a loop": ("for a in b:\n c()\nelse:\n d()", "for a in b:\n c()\nd()"),
    "a pattern's constant": (
        "match a:\n case None: b()",
        "match a:\n case True: b()",
    ),
    "a pattern's name and a star": (
        "def f(a):\n match a:\n  case [b, *_]: return b",
        "def f(a):\n match a:\n  case [b, _]: return b",
    ),
    "a double star": ("f(*a)", "f(**a)"),
    "what unpacks in a mapping": ("x = {**a, 'b': 1}", "x = {'b': 1, **a}"),
    "a slice": ("x[1:]", "x[:1]"),
    "one element": ("x = (1,)", "x = 1"),
    "mangled names": (
        "class A:\n def f(self): return self.__x",
        "class A:\n def f(self): return self._x",
    ),
    "a yield": ("def f():\n yield a", "def f():\n yield from a"),
    "a chain of comparisons": ("x = a < b < c", "x = a < b and b < c"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_means_nothing_is_left_out(name):
    one, two = EQUAL[name]
    assert one != two
    assert digest_source(one) == digest_source(two)
    assert fingerprint_module(one).digest == fingerprint_module(two).digest


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_means_something_is_kept(name):
    one, two = DIFFERENT[name]
    assert digest_source(one)[0] != digest_source(two)[0]
    assert fingerprint_module(one).digest != fingerprint_module(two).digest
    assert digest_source(one)[1] == digest_source(two)[1] == LEVEL_SYNTAX


def test_digests_are_those_of_every_python():
    golden = json.loads(_GOLDEN.read_text("utf-8"))
    found = {
        f"{name} {place}": fingerprint_module(text).digest
        for texts in (EQUAL, DIFFERENT)
        for name, pair in texts.items()
        for place, text in enumerate(pair)
    }
    assert found == golden


def test_bytes_and_text_are_one():
    text = "# -*- coding: latin-1 -*-\nx = 'ä'\n"
    assert digest_source(text) == digest_source(text.encode("latin-1"))
    assert digest_source("\ufeffx = 1".encode()) == digest_source("x = 1")


@pytest.mark.parametrize(
    "source",
    [
        "def f(:",
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "-" * 100_000 + "1",
        "x = 1\0",
        b"# coding: klingon\nx = 1",
        b"x = '\xff'",
        "print 'two'",
        "#" * 5_000_000,
    ],
    ids=[
        "no Python",
        "brackets",
        "signs",
        "a null",
        "a coding",
        "no text",
        "Python 2",
        "too large",
    ],
)
def test_what_cannot_be_read_is_known_by_its_bytes(source):
    digest, level = digest_source(source)
    assert level == LEVEL_BYTES
    other = source + ("\n" if isinstance(source, str) else b"\n")
    assert digest_source(other) != (digest, level)
    fingerprint = fingerprint_module(source)
    assert (fingerprint.level, fingerprint.units) == (LEVEL_BYTES, ())
    assert fingerprint.reason


def test_depth_that_the_parser_takes_is_no_trouble():
    deep = "x = " + " + ".join(["a"] * 250) + "\n"
    for depth in range(80):
        deep += "    " * depth + f"if a{depth}:\n"
    deep += "    " * 80 + "b()\n"
    parse_source(deep)
    assert digest_source(deep)[1] == LEVEL_SYNTAX
    assert digest_source(deep)[0] != digest_source(deep.replace("b()", "c()"))[0]
