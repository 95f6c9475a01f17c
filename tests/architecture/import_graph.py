"""The modules of the packages and who imports whom: late imports and imports of types counted."""

import ast
from collections import defaultdict

from code_lines import iterate_statements

# The contract of plugins names types of every room, and imports none of them at run time.
_CONTRACT = {"quark_core.api", "quark_core.hookspecs"}


def find_imports(tree, module, is_package, modules):
    """Find the modules that a module imports, among `modules`.

    An import in a function counts like one at the top. A module that is named by a string is not
    seen. `from a import b` imports the module `a.b` if there is one, and `a` otherwise.

    Returns:
        Two sets: modules that are imported at run time, and modules that are imported only below
        `if TYPE_CHECKING`; of the contract of plugins the second is empty.
    """
    at_run_time, for_types = set(), set()
    statements = list(iterate_statements(tree))
    only_for_types = {
        id(inner)
        for node in statements
        if isinstance(node, ast.If) and _asks_for_types(node.test)
        for child in node.body
        for inner in iterate_statements(child)
    }
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = _name_imports(node, module, is_package, modules)
            if id(node) in only_for_types and module in _CONTRACT:
                continue
            found = for_types if id(node) in only_for_types else at_run_time
            found.update(names & modules - {module})
    return at_run_time, for_types - at_run_time


def _asks_for_types(test):
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _name_imports(node, module, is_package, modules):
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        kept = len(parts) - node.level + is_package
        base = ".".join([*parts[:kept], *filter(None, [node.module])])
    below = {f"{base}.{alias.name}" for alias in node.names}
    found = below & modules
    return found if len(found) == len(below) else found | {base}


def count_importers(graph):
    """Count, for each module, the modules that import it."""
    importers = defaultdict(int)
    for imported in graph.values():
        for module in imported:
            importers[module] += 1
    return {module: importers[module] for module in graph}


def find_cycles(graph):
    """Find the groups of modules that import each other, directly or in a circle (Tarjan)."""
    order, lowest, stack, on_stack, cycles = {}, {}, [], set(), []
    for root in sorted(graph):
        if root in order:
            continue
        calls = [(root, iter(sorted(graph[root])))]
        order[root] = lowest[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while calls:
            module, rest = calls[-1]
            for imported in rest:
                if imported not in order:
                    order[imported] = lowest[imported] = len(order)
                    stack.append(imported)
                    on_stack.add(imported)
                    calls.append((imported, iter(sorted(graph[imported]))))
                    break
                if imported in on_stack:
                    lowest[module] = min(lowest[module], order[imported])
            else:
                calls.pop()
                if calls:
                    parent = calls[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[module])
                if lowest[module] == order[module]:
                    cycle = set()
                    while module not in cycle:
                        cycle.add(stack.pop())
                    on_stack -= cycle
                    if len(cycle) > 1:
                        cycles.append(sorted(cycle))
    return sorted(cycles)
