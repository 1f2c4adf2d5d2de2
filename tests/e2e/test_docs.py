"""The documentation is true as far as a program can tell: its code runs, and what it names exists."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import itertools
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from celery.exceptions import Retry
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator
from django.db import connections
from django.test import RequestFactory, override_settings
from django.urls import path as route
from docutils import nodes

import django_sqlsem
from django_sqlsem import AcquireTimeoutError, conf, mutex, semaphore
from django_sqlsem.checks import messages
from django_sqlsem.management.commands.locks import Command
from django_sqlsem.testing import busy, stop_requested
from tests.support.databases import ROOT
from tests.support.threads import wait_until

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *DOCS]
PACKAGE = Path(django_sqlsem.__file__).parent
CHECKERS = sorted((PACKAGE / "checks").rglob("*.py"))
CHECKS = "".join(path.read_text(encoding="utf-8") for path in CHECKERS)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_pages = itertools.count(1)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [text for _indent, tongue, text in FENCE.findall(text_of(page)) if tongue == language]


def prose(page: Path) -> str:
    return FENCE.sub("", text_of(page))


def commands() -> list[Any]:
    """Every command line of the documentation, with its page; but for the tutorial, which test_tutorial.py follows."""
    return [
        pytest.param(line.strip().removeprefix("$ "), id=f"{page.name}: {line.strip()}")
        for page in PAGES
        if page.name != "tutorial.md"
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.strip().startswith("$ ")
    ]


def compiled(block: str) -> Any:
    """Return the code of a block, in which ``await`` may stand at the top."""
    return compile(block, "<docs>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_tests_that_the_articles_page_names_exist() -> None:
    page = text_of(ROOT / "docs" / "seeds.md")
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named
    assert not [name for name in sorted(named) if f"def {name}(" not in sources]
    files = set(re.findall(r"`((?:tests/(?:\w+/)?)?test_\w+\.py)`", page))
    below = [name if name.startswith("tests/") else f"tests/contract/{name}" for name in files]
    assert not [name for name in below if not (ROOT / name).exists()]


@pages
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compiled(block)


def run_page(page: Path) -> dict[str, Any]:
    """Run all blocks of a page, one after the other, in one namespace; return that."""
    namespace: dict[str, Any] = {"__name__": f"docs_page_{next(_pages)}"}  # Celery wants its tasks' names to differ
    for block in blocks(page, "python"):
        code = compiled(block)
        result = eval(code, namespace)  # noqa: S307 - our own documentation
        if asyncio.iscoroutine(result):
            asyncio.run(result)
    return namespace


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_python_runs(database: str, settings: Any, name: str) -> None:
    settings.SQLSEM = {"DATABASE": database}
    page = run_page(ROOT / name)
    request = RequestFactory().get("/")
    assert page["monthly_report"](request).status_code == 200
    with busy("reports"):
        assert page["monthly_report"](request).status_code == 503


def test_the_decorators_of_the_page_on_semaphores_do_what_it_says(database: str, settings: Any) -> None:
    settings.SQLSEM = {"DATABASE": database}
    page = run_page(ROOT / "docs" / "semaphore.md")
    request = RequestFactory().get("/")
    request.user = type("User", (), {"pk": 7, "get_username": lambda self: "anna"})()
    assert page["sync"](request).status_code == 200
    with busy("sync:7"):
        assert page["sync"](request).status_code == 429
    assert page["clean_up"]() == "cleaned"
    with busy("cleanup"):
        assert page["clean_up"]() is None
    assert page["import_file"]("x") == "x"


def test_the_recipe_for_a_provider_answers_503_and_retries(
    database: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SQLSEM = {"DATABASE": database}
    page = run_page(ROOT / "docs" / "recipes.md")
    view, task, retried = page["prices"], page["import_prices"], []
    monkeypatch.setattr(task, "retry", lambda **kwargs: retried.append(kwargs["exc"]) or Retry())
    assert view(RequestFactory().get("/")).content == task.run().encode() == b"the answer for /prices"
    with busy("provider"):
        answer = view(RequestFactory().get("/"))
        with pytest.raises(Retry):
            task.run()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert [type(error) for error in retried] == [AcquireTimeoutError]


def test_the_tests_in_testing_md_pass(tmp_path: Path) -> None:
    module = tmp_path / "test_reports.py"
    module.write_text("\n\n".join(blocks(ROOT / "docs" / "testing.md", "python")), encoding="utf-8")
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": str(ROOT),
        "SQLSEM_TEST_DATABASES": json.dumps({"default": database}),
    }
    # Away from the repository's own configuration and fixtures, as in a project of one's own.
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "django_sqlsem.pytest_plugin",
        str(module),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout


def test_who_is_asked_to_stop_stops(database: str, settings: Any) -> None:
    settings.SQLSEM = {"DATABASE": database}
    page = run_page(ROOT / "docs" / "stopping.md")
    pages = ["a", "b"]
    assert page["rebuild"](pages) == page["rebuild_all"](pages) == pages
    put_off = []
    page["rebuild_all"].apply_async = lambda args, countdown: put_off.append(args)
    with stop_requested("index"):
        assert page["rebuild"](pages) == page["rebuild_all"](pages) == []
    assert put_off == [[pages]]
    with semaphore("reports", slots=2) as permit:
        assert page["before_the_deployment"]() == [os.getpid()]
        wait_until(lambda: permit.stop_requested)
    assert page["INDEX"].status().paused


def test_the_page_on_asynchronous_code_does_what_it_says(database: str, settings: Any) -> None:
    settings.SQLSEM = {"DATABASE": database}
    page = run_page(ROOT / "docs" / "async.md")
    request = RequestFactory().get("/")

    def talk(consumer: Any) -> Any:
        return WebsocketCommunicator(URLRouter([route("<room>", consumer.as_asgi())]), "/room")

    async def main() -> None:
        assert (await page["monthly_report"](request)).content == b"the report"
        assert await page["resize"]("x") == await page["resize_at_once"]("x") == "x"
        assert [part async for part in await page["stream"](request)] == [b"0\n", b"1\n", b"2\n"]
        chat, first, second = talk(page["Chat"]), talk(page["Seat"]), talk(page["Seat"])
        for each in (chat, first):
            await each.connect(timeout=30)
        await chat.send_to(text_data="Hello")
        assert await chat.receive_from(timeout=30) == "Hello!"
        assert await first.receive_from(timeout=30) == "Your turn."
        await second.connect(timeout=30)
        await first.disconnect(timeout=30)
        assert await second.receive_from(timeout=30) == "Your turn."
        for each in (chat, second):
            await each.disconnect(timeout=30)
        await sync_to_async(connections.close_all)()

    asyncio.run(main())


@pytest.mark.parametrize("page", [ROOT / "docs" / "settings.md"], ids=["settings.md"])
def test_the_example_of_the_settings_is_legal(page: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(blocks(page, "python")[0], namespace)
    with override_settings(SQLSEM=namespace["SQLSEM"]):
        assert (conf.config().lease, conf.config("default").timeout) == (30, 10)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `([^`]+)` \| (yes|no) \|", text_of(ROOT / "docs/settings.md"), re.M)
    assert {key for key, _, _ in rows} == set(conf.KEYS)
    for key, default, per_alias in rows:
        assert (per_alias == "yes") == (key not in conf._NOT_PER_ALIAS)
        assert ast.literal_eval(default) == ({} if key == "DATABASES" else getattr(conf.Config(), key.lower()))


@pages
def test_settings_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"SQLSEM\[[\"'](\w+)[\"']\]", text_of(page)))
    assert named <= set(conf.KEYS)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://")
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_no_name_is_used_as_kinds_that_refuse_one_another() -> None:
    """Whatever pages a reader tries on one database, in whatever order."""
    used: dict[str, set[str]] = {}
    for page in PAGES:
        for kind, name in re.findall(
            r'\b(mutex|semaphore|rlock|rwlock|counter|refresh_every)\(f?"([^"]+)"', text_of(page)
        ):
            used.setdefault(name, set()).add("semaphore" if kind == "mutex" else kind)
    for line in commands():
        if found := re.search(r"\blocks run (\S+)", line.values[0]):
            used.setdefault(found[1], set()).add("semaphore")
    assert {"nightly", "reports", "prices"} <= used.keys()
    assert {name: kinds for name, kinds in used.items() if len(kinds) > 1} == {}


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(index))}
    linked = {page for page in linked if page.suffix != ".png"}
    assert linked == {*DOCS, *(ROOT / "docs").glob("*.rst")} - {index}


@pages
def test_modules_that_are_named_exist(page: Path) -> None:
    for name in set(re.findall(r"`(django_sqlsem(?:\.\w+)+)`", prose(page))):
        pkgutil.resolve_name(name)


def test_every_check_has_a_heading_and_every_hint_leads_there() -> None:
    page = ROOT / "docs" / "checks.md"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    documentation = project["urls"]["Documentation"]
    assert documentation in text_of(ROOT / "README.md")
    found = set(re.findall(r'"([EWID]\d+)", ', CHECKS))
    assert {number[0] for number in found} == set("EWID")
    headings = re.findall(r"^## (sqlsem\.\w+)$", text_of(page), re.MULTILINE)
    assert sorted(headings) == sorted(f"sqlsem.{number}" for number in found)
    for number in found:
        message = messages.warning(number, "text", "advice")
        address, _, anchor = str(message.hint).removeprefix("advice See ").partition("#")
        assert address == f"{documentation}page/checks.html"  # the site's own form: its usual version of the page
        assert anchor == nodes.make_id(f"sqlsem.{number}")


@pages
def test_checks_that_are_named_exist(page: Path) -> None:
    for number in set(re.findall(r"sqlsem\.([EWID]\d+)", text_of(page))):
        assert f'"{number}", ' in CHECKS


@pytest.mark.parametrize("line", commands())
def test_commands_that_are_shown_exist(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        makefile = text_of(ROOT / "Makefile")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
        assert all(re.search(rf"\b{word.partition('=')[0]}\b", makefile) for word in words[2:])
    elif words[:3] == ["python", "manage.py", "locks"]:
        Command().create_parser("manage.py", "locks").parse_args(words[3:])
    else:
        known = (["python", "-m", "pip"], ["python", "manage.py", "check"], ["python", "manage.py", "migrate"])
        assert words[:3] in known


def test_every_verb_and_option_of_the_command_is_documented_and_no_other() -> None:
    parser = Command().create_parser("manage.py", "locks")
    (verbs,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    page = text_of(ROOT / "docs" / "command.md")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(verbs) == set(sections) - {"Exit"}
    for verb, sub in verbs.items():
        known = {option for action in sub._actions for option in action.option_strings}
        listed = set(re.findall(r"^\* `(--[\w-]+)", sections[verb], re.MULTILINE))
        common = {"--database", "--help", "--no-input"}
        own = [option for action in parser._actions for option in action.option_strings]  # Django's
        common |= {option for option in own if option.startswith("--")}
        assert listed - known == set(), verb
        listed |= set(re.findall(r"(--format) json", sections[verb]))
        assert {option for option in known if option.startswith("--")} - listed == common & known, verb


def test_every_argument_of_semaphore_is_on_its_page() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", text_of(ROOT / "docs" / "semaphore.md"), re.MULTILINE))
    assert documented == set(inspect.signature(semaphore).parameters) - {"name"}
    assert mutex("one").slots == 1
