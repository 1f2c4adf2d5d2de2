"""The rules of the house: what keeps the package easy to enter. A list of exceptions may only shrink."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import django_sqlsem
from tests.support.databases import ROOT, child_environment

PACKAGE = Path(django_sqlsem.__file__).parent
LONGEST = 60
#: Functions of more than LONGEST lines.
LONG = {
    "refresh/__init__.py:refresh_every",
}
#: Modules besides ``__init__`` that one folder may have.
MOST_MODULES = 15
#: Modules in all, ``__init__`` and the root's included: a new one replaces another. This number may only fall.
MODULES_IN_ALL = 158
#: A module of fewer lines is a leaf that several others import.
SHORT = 60
#: Shorter modules that fewer than two import: what Django finds by name, and what should go.
ALONE = {
    "apps.py",
}
#: Fields of ``Acquisition``, the one record of an acquisition.
FIELDS_OF_THE_RECORD = 27
#: Classes that inherit from a class of ours that inherits from a class of ours.
DEEP = {
    "ClientGoneError",
    "FencedError",
}
#: Class names that two modules use.
SHARED_CLASSES: set[str] = set()
#: Modules whose locks serve only the tests of projects.
PLAIN_LOCKS = {"backends/local.py"}
#: Names of public constants that two modules use for different values.
SHARED_CONSTANTS: set[str] = set()
#: Modules that import another of ours inside a function, and how often.
LATE: dict[str, int] = {}
#: Modules that ``manage.py locks list`` loads beyond ``django.setup()``, without those of the backend.
MOST_FOR_LIST = 7
#: Modules of the backend that it loads, as the first acquire of a process does.
BACKEND_FOR_LIST = 15
#: Places that catch what interrupts a thread.
INTERRUPTIONS = 12


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The package's modules, parsed when a test asks for them."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts]
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    found = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append((module, node))
    return found


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]


def test_no_function_is_long() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {
        f"{module}:{node.name}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, functions) and (node.end_lineno or 0) - node.lineno >= LONGEST
    }
    assert found == LONG


def test_a_class_is_whole_and_inherits_once() -> None:
    known = classes()
    deep = set()
    for name, places in known.items():
        for _module, node in places:
            parents = [parent for base in bases(node) for _, parent in known.get(base, [])]
            if any(base in known and base != name for parent in parents for base in bases(parent)):
                deep.add(name)
    assert deep == DEEP


def test_no_name_has_two_meanings() -> None:
    assert {name for name, places in classes().items() if len(places) > 1} == SHARED_CLASSES
    values = defaultdict(set)
    for tree in modules().values():
        for node in tree.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
                continue
            if node.target.id.isupper() and not node.target.id.startswith("_"):
                values[node.target.id].add(ast.unparse(node.value))
    assert {name for name, different in values.items() if len(different) > 1} == SHARED_CONSTANTS


def test_a_folder_is_one_job() -> None:
    folders = defaultdict(list)
    for module in modules():
        path = Path(module)
        if path.name != "__init__.py":
            folders[str(path.parent)].append(path.stem)
    assert {folder: len(names) for folder, names in folders.items() if len(names) > MOST_MODULES} == {}
    families = Counter((folder, name.split("_")[0]) for folder, names in folders.items() for name in names)
    assert {family for family, count in families.items() if count > 2} == set(), "a prefix of three is a missing folder"


def test_a_module_is_one_idea() -> None:
    assert len(modules()) <= MODULES_IN_ALL
    importers = defaultdict(set)
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_sqlsem"):
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers[f"{name}.py".replace(".", "/", name.count(".")).partition("/")[2]].add(module)
    short = {module for module in modules() if len((PACKAGE / module).read_text(encoding="utf-8").splitlines()) < SHORT}
    alone = {module for module in short if not module.endswith("__init__.py") and len(importers[module]) < 2}
    assert alone == ALONE


def test_the_record_of_an_acquisition_stays_small() -> None:
    (record,) = [
        node
        for node in modules()["runtime/acquisition.py"].body
        if isinstance(node, ast.ClassDef) and node.name == "Acquisition"
    ]
    fields = {
        node.attr
        for node in ast.walk(record)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert len(fields) <= FIELDS_OF_THE_RECORD, fields


def test_imports_stand_at_the_top() -> None:
    inside = Counter(
        module
        for module, tree in modules().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("django_sqlsem")
    )
    assert inside == LATE


def test_few_places_catch_interruptions() -> None:
    caught = [
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is not None and "BaseException" in ast.unparse(node.type)
    ]
    assert len(caught) <= INTERRUPTIONS, caught


def test_a_verb_of_the_command_loads_no_other(committed: None) -> None:
    code = """
import json, sys
import django
from django.core.management import execute_from_command_line
django.setup()
before = set(sys.modules)
execute_from_command_line(["manage.py", "locks", "list"])
print(json.dumps([name for name in set(sys.modules) - before if name.startswith("django_sqlsem")]))
"""
    environment = child_environment()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    listed, loaded = done.stdout.splitlines()
    assert listed.startswith("Nothing is held"), done.stderr
    backend = [name for name in json.loads(loaded) if name.startswith("django_sqlsem.backends")]
    others = [name for name in json.loads(loaded) if name not in backend]
    assert len(backend) <= BACKEND_FOR_LIST, backend
    assert len(others) <= MOST_FOR_LIST, others


def test_a_process_that_uses_a_lock_loads_only_what_locks_need(committed: None) -> None:
    code = """
import sys
import django
from django.conf import settings
settings.INSTALLED_APPS = ["django_sqlsem"]
django.setup()
from django_sqlsem import semaphore
semaphore("reports", slots=3).acquire(20).release()
print("\\n".join(sys.modules))
"""
    environment = child_environment()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "django_sqlsem.runtime.keeper" in loaded, done.stderr
    for what in ("django_sqlsem.checks.servers", "django_sqlsem.queries", "django_sqlsem.control"):
        assert what not in loaded


def test_one_module_draws_random_numbers() -> None:
    """The program's own ``random`` may be seeded alike in every process, which would keep them in step."""
    importing = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names)
    }
    assert importing == {"core/clocks.py"}


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs in the same frame as a block, and the block's own statements."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.GeneratorExp):
            yield child
            yield from inside(child)


def jumps_back(node: ast.AST) -> bool:
    """Whether a condition leads back to the beginning of a loop."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
        return any(part.ifs for part in node.generators)
    return isinstance(node, ast.For | ast.While) and any(isinstance(each, ast.If) for each in inside(node))


def test_no_condition_leads_back_in_a_loop_under_a_lock():
    """On Python 3.13 an exception that a signal raises at such a jump leaves the block without its end.

    The jump is in no entry of the function's exception table, so ``__exit__`` is not called, and the lock stays locked:
    https://github.com/python/cpython/issues/130279. A function of its own, or a generator, keeps the loop out of it.
    """
    found = [
        f"{name}:{each.lineno}"
        for name, module in modules().items()
        if name not in PLAIN_LOCKS
        for block in ast.walk(module)
        if isinstance(block, ast.With) and any(ast.unparse(item.context_expr).endswith("lock") for item in block.items)
        for each in inside(block)
        if jumps_back(each)
    ]
    assert not found
