"""Plugins are found one by one; a broken one is left out with a reason, and hides no other."""

import pytest

from quark_core.backends.contract import BackendDefinition, Capability
from quark_core.backends.registry import BackendRegistry, check_capabilities
from quark_core.errors import BackendContractError, UnknownBackendError
from quark_core.hookspecs import hookimpl

HEAD = """
from quark_core.backends.contract import BackendDefinition
from quark_core.hookspecs import hookimpl

def define(name, **fields):
    return BackendDefinition(**{"name": name, "summary": "s", "open": print, **fields})

"""
HOOK = HEAD + "@hookimpl\ndef quark_register_backends():\n    "
GOOD = HOOK + "return [define('good', schemes=['goods'])]\n"
BROKEN = {
    "import": ("raise ImportError('no client')", "import failed: ImportError: no client"),
    "exit": ("import sys; sys.exit(3)", "import failed: SystemExit: 3"),
    "syntax": ("def", "import failed: SyntaxError: invalid syntax"),
    "a text": (HOOK + "return ['csv2']", "it declares str, not a BackendDefinition"),
    "nothing": (HOOK + "return None", "TypeError: 'NoneType' object is not iterable"),
    "version": (HOOK + "return [define('broken', api_version=99)]", "it uses version 99 of"),
    "taken": (HOOK + "return [define('csv')]", "its name is already used by quark-tracker"),
    "raises": (HOOK + "1 / 0", "ZeroDivisionError: division by zero"),
    "exits": (HOOK + "raise SystemExit(4)", "SystemExit: 4"),
    "midway": (HOOK + "yield define('half')\n    1 / 0", "ZeroDivisionError: division by zero"),
    "unknown hook": (
        HEAD + "@hookimpl\ndef quark_unheard_of(): pass",
        "PluginValidationError: unknown hook 'quark_unheard_of'",
    ),
    "wrong arguments": (
        HEAD + "@hookimpl\ndef quark_run_started(session): pass",
        "PluginValidationError: Plugin 'broken' for hook 'quark_run_started'",
    ),
    "no name": (HOOK + "return [define(3)]", ""),
    "name of no use": (HOOK + "return [define(['a'])]", ""),
    "no schemes": (HOOK + "return [define('broken', schemes=None)]", ""),
    "no capabilities": (HOOK + "return [define('broken', capabilities=None)]", ""),
    "unusable name": (HOOK + "return [define('Broken one')]", ""),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_left_out_and_the_others_remain(built_in, make_point, source, reason):
    points = [make_point("broken", source), make_point("good", GOOD), *built_in]
    with pytest.warns(RuntimeWarning) as warned:
        registry = BackendRegistry.discover(points)
    assert registry.names == ("csv", "embedded", "good")
    assert [definition.name for definition in registry.definitions] == list(registry.names)
    (left_out,) = registry.left_out
    assert left_out.reason.startswith(reason)
    assert left_out.origin == points[0].value
    (warning,) = warned
    assert left_out.reason in str(warning.message)
    assert repr(left_out.name) in str(warning.message)


def test_an_interrupt_while_a_plugin_is_imported_is_not_swallowed(make_point):
    with pytest.raises(KeyboardInterrupt):
        BackendRegistry.discover([make_point("slow", "raise KeyboardInterrupt")])


def test_the_installed_backends_are_found_without_a_warning(registry):
    assert registry.names == ("csv", "embedded")
    assert registry.left_out == ()
    assert registry.origin("csv") == registry.origin("embedded") == "quark-tracker"


def test_a_good_definition_beside_a_bad_one_remains(make_point):
    source = HOOK + "return [define('one'), 'two', define('three', api_version=0), define('four')]"
    with pytest.warns(RuntimeWarning) as warned:
        registry = BackendRegistry.discover([make_point("mixed", source)])
    assert registry.names == ("four", "one")
    assert [item.name for item in registry.left_out] == ["mixed", "three"]
    assert len(warned) == 2


def test_a_second_plugin_of_a_name_leaves_the_first_as_it_was(plugin, define):
    class Listening(plugin):
        heard = 0

        @hookimpl
        def quark_run_started(self, context):
            self.heard += 1

    registry = BackendRegistry()
    first, second = Listening(define("first")), Listening(define("second"))
    registry.register(first, name="same")
    with pytest.warns(RuntimeWarning, match="same"):
        registry.register(second, name="same")
    assert registry.names == ("first",)
    assert [item.name for item in registry.left_out] == ["same"]
    registry.notify("quark_run_started", context=None)
    assert (first.heard, second.heard) == (1, 0)


def test_one_plugin_under_two_names_counts_once(plugin, define):
    registry, twice = BackendRegistry(), plugin(define("twice"))
    registry.register(twice, name="one")
    with pytest.warns(RuntimeWarning, match="two"):
        registry.register(twice, name="two")
    assert registry.names == ("twice",)


@pytest.mark.parametrize("case", ["import", "exit", "raises", "version"])
def test_asking_for_a_broken_plugin_names_what_is_wrong(built_in, make_point, case):
    source, reason = BROKEN[case]
    with pytest.warns(RuntimeWarning):
        registry = BackendRegistry.discover([make_point("broken", source), *built_in])
    with pytest.raises(BackendContractError, match="'broken'") as raised:
        registry.find("broken")
    assert reason in str(raised.value)
    assert raised.value.backend == "broken"
    assert registry.find("csv").name == "csv"


def test_a_backend_is_found_by_name_and_by_scheme(make_point, built_in):
    registry = BackendRegistry.discover([make_point("good", GOOD), *built_in])
    assert registry.find("good") is registry.find("goods")
    assert registry.find("csv").name == "csv"


def test_a_scheme_belongs_to_the_first_that_took_it(plugin, define):
    registry = BackendRegistry()
    registry.register(plugin(define("one", schemes=["x"]), define("two", schemes=["x"])), name="p")
    assert registry.find("x").name == "one"


def test_an_unknown_name_lists_what_is_installed(registry):
    with pytest.raises(UnknownBackendError) as raised:
        registry.find("absent")
    assert "'absent' is not an installed backend (installed: 'csv', 'embedded')" in str(
        raised.value
    )
    assert "pip install" not in str(raised.value)
    assert raised.value.backend == "absent"


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "wandb"])
def test_an_absent_backend_of_an_extra_says_what_to_install(registry, name):
    with pytest.raises(UnknownBackendError) as raised:
        registry.find(name)
    assert f'pip install "quark-tracker[{name}]"' in str(raised.value)
    assert "'csv', 'embedded'" in str(raised.value)


@pytest.mark.parametrize("name", ["service", "http", "https"])
def test_an_absent_backend_of_the_base_says_that_the_installation_is_not_whole(registry, name):
    with pytest.raises(UnknownBackendError, match="reinstall quark-tracker"):
        registry.find(name)


class Writes:
    def write(self, batch): ...
    def close(self): ...


class Reads(Writes):
    def read(self, run_id, kind, query): ...
    def load_run(self, run_id): ...
    def list_runs(self, *, project=None, limit=None): ...


class Primary(Reads):
    def locate(self, run_id): ...


class WholePrimary(Primary):
    def write_generation(self, generation): ...
    def read_outputs(self, run_id, kind, analyzer=None): ...


class Mirror(Reads):
    def write_generation(self, generation): ...
    def read_outputs(self, run_id, kind, analyzer=None): ...


class Groups(Writes):
    def write_group(self, batches): ...


@pytest.mark.parametrize(
    ("opened", "capabilities", "message"),
    [
        (object(), "", "has no write"),
        (None, "", "opened NoneType"),
        (Writes(), "read", "declares read but does not implement SupportsRead"),
        (Writes(), "groups", "declares groups but does not implement SupportsGroups"),
        (Reads(), "primary read idempotent", "declares primary but does not implement"),
        (Reads(), "", "implements SupportsRead but does not declare read"),
        (Groups(), "idempotent", "implements SupportsGroups but does not declare groups"),
        (Primary(), "read idempotent", "implements SupportsPrimary but does not declare primary"),
        (Mirror(), "read generations", "declares generations without primary"),
        (Primary(), "primary read", "declares primary without generations, idempotent: findings"),
        (
            Primary(),
            "primary read idempotent",
            "declares primary without generations: findings of analyze() cannot be stored",
        ),
    ],
)
def test_a_lie_about_capabilities_is_caught(define, opened, capabilities, message):
    definition = define("liar", capabilities=frozenset(map(Capability, capabilities.split())))
    with pytest.raises(BackendContractError, match="'liar'") as raised:
        check_capabilities(definition, opened)
    assert message in str(raised.value)
    assert raised.value.backend == "liar"


@pytest.mark.parametrize(
    ("opened", "capabilities"),
    [
        (Writes(), ""),
        (Writes(), "idempotent"),
        (Reads(), "read"),
        (Groups(), "groups idempotent"),
        (WholePrimary(), "primary read idempotent generations"),
    ],
)
def test_a_true_declaration_returns_the_backend(define, opened, capabilities):
    definition = define("honest", capabilities=frozenset(map(Capability, capabilities.split())))
    assert isinstance(definition, BackendDefinition)
    assert check_capabilities(definition, opened) is opened
