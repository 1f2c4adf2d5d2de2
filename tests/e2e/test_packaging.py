"""Guards: what is easily forgotten when something is added."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.models import NOT_PROVIDED

import django_sqlsem
from django_sqlsem import conf, exceptions
from tests.support.databases import ROOT

PACKAGE = Path(django_sqlsem.__file__).parent
TEMPLATES = sorted(PACKAGE.rglob("templates/**/*.html"))
EXCEPTIONS = [
    cls
    for _, cls in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == exceptions.__name__
]
#: Inline style, inline script and handlers in attributes: a strict content security policy refuses them all.
INLINE = re.compile(
    r"<style\b|\sstyle\s*=|<script\b(?![^>]*\b(?:src\s*=|type\s*=\s*[\"']?application/json))|<[^>{%]*\son[a-z]+\s*=|javascript:",
    re.IGNORECASE,
)


def test_the_public_api_is_what_all_says():
    expected = {"Permit", "Semaphore", "current_permit", "mutex", "semaphore"} | {cls.__name__ for cls in EXCEPTIONS}
    assert set(django_sqlsem.__all__) - {"__version__"} == expected
    assert len(django_sqlsem.__all__) == len(expected) + 1
    for name in expected:
        assert getattr(django_sqlsem, name).__name__ == name


def test_the_root_shows_nothing_else():
    shown = {
        name for name, value in vars(django_sqlsem).items() if not (name.startswith("_") or inspect.ismodule(value))
    }
    assert shown - {"annotations", "TYPE_CHECKING"} <= set(django_sqlsem.__all__)


@pytest.mark.parametrize("cls", EXCEPTIONS, ids=lambda cls: cls.__name__)
def test_an_exceptions_docstring_is_its_message(cls):
    docstring = vars(cls).get("__doc__")
    assert docstring
    assert docstring.strip().endswith(".")
    assert cls.__name__.endswith("Error")
    if issubclass(cls, exceptions.SemaphoreError):
        assert str(cls()) == docstring.strip()


def adds_only(operation):
    """Whether code that does not know of the operation can go on writing its rows after it."""
    if isinstance(operation, migrations.AddField):
        return operation.field.null or operation.field.db_default is not NOT_PROVIDED
    if isinstance(operation, migrations.AlterModelOptions):  # it changes no table
        return True
    if isinstance(operation, migrations.RunPython):  # stored procedures, whose last version stays beside the new one
        return operation.code.__module__.endswith("0002_procedures") and operation.reversible
    return isinstance(operation, (migrations.AddConstraint, migrations.AddIndex, migrations.CreateModel))


def test_migrations_only_add():
    loader = MigrationLoader(None, ignore_no_migrations=True)
    #: The one that the first release begins with.
    first = {"0001_initial"}
    seen = [
        (name, operation)
        for (app, name), migration in sorted(loader.disk_migrations.items())
        if app == "sqlsem" and name not in first
        for operation in migration.operations
    ]
    assert [(name, operation.describe()) for name, operation in seen if not adds_only(operation)] == []
    assert not adds_only(migrations.RemoveField("slotrow", "mode"))
    assert not adds_only(migrations.AddField("slotrow", "mode", models.IntegerField(default=0)))


@pytest.mark.django_db(databases="__all__")
def test_the_migrations_are_complete():
    call_command("makemigrations", "sqlsem", check=True, dry_run=True, verbosity=0)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_template_has_no_inline_style_or_script(path):
    found = [match.group() for match in INLINE.finditer(path.read_text(encoding="utf-8"))]
    assert not found, f"{path.name}: {found}"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('<p style="color: red">', True),
        ("<style>p { color: red }</style>", True),
        ("<script>go()</script>", True),
        ('<a href="#" onclick="go()">', True),
        ('<a href="javascript:go()">', True),
        ("<script src=\"{% static 'sqlsem/live.js' %}\" defer></script>", False),
        ('<link rel="stylesheet" href="x.css"><p class="style">on = off</p>', False),
    ],
)
def test_the_search_for_inline_code_finds_it(text, refused):
    assert bool(INLINE.search(text)) is refused


@pytest.mark.parametrize("key", conf.KEYS)
def test_a_setting_is_documented(key):
    assert f"`{key}`" in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_every_module_begins_with_the_future_import():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.strip() and "migrations" not in path.parts:
            assert "from __future__ import annotations\n" in text, path


def test_the_core_needs_django_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.split(r"\W", requirement)[0] for requirement in project["dependencies"]] == ["Django"]


def test_every_requirement_of_the_demo_is_in_dev():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    assert set(groups["demo"]) <= set(groups["dev"])


def test_the_readme_of_the_index_has_no_relative_link():
    """As the build makes it: the index has none of the files beside it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
