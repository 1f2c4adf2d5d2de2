"""Every block of code of the documentation is run, as it stands there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_sqlsem import semaphore
from django_sqlsem.testing import held
from tests.e2e.test_docs import FENCE, PAGES, blocks, commands, text_of
from tests.support.databases import ROOT

#: The languages of blocks, and where they are run or looked at. ``text`` shows what is printed.
LANGUAGES = {
    "console": "below, and in test_docs.py",
    "html": "test_busy.py, tests/places/test_frameworks.py",
    "postgresql": "tests/contract/test_citus.py",
    "py": "test_tutorial.py",
    "python": "below",
    "sh": "test_other_languages.py, test_hostile_requests.py, test_tutorial.py",
    "sql": "test_tsql_lint.py",
    "text": "",
    "": "",
}
WITH_CODE = [page for page in PAGES if blocks(page, "python")]


def locks_commands() -> list[Any]:
    """Every ``python manage.py locks`` of the documentation, once."""
    lines = {parameter.values[0]: parameter for parameter in commands()}
    return [each for line, each in lines.items() if line.startswith("python manage.py locks ")]


def test_no_block_is_in_a_language_that_nothing_runs() -> None:
    found = {language for page in PAGES for _indent, language, _text in FENCE.findall(text_of(page))}
    assert found <= set(LANGUAGES)


def test_python_of_every_page_runs(tmp_path: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    environment = os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "SQLSEM_TEST_DATABASES": json.dumps({"default": database}),
    }
    command = [sys.executable, "-m", "tests.support.docs_pages", *map(str, WITH_CODE)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    raised = json.loads(done.stdout.splitlines()[-1])
    assert not raised, "\n".join(raised.values())


class Operator(io.StringIO):
    """A terminal at which somebody says yes."""

    def __init__(self) -> None:
        super().__init__("yes\n" * 9)

    def isatty(self) -> bool:
        return True


@pytest.fixture
def site(committed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project in which the names of the documentation are in use, and an operator who says yes."""
    for name in ("backup.sh", "deploy.sh"):
        script = tmp_path / name
        script.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
        script.chmod(0o755)
    semaphore("provider", slots=5).acquire().release()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Operator())
    with contextlib.ExitStack() as stack:
        for name in ("reports", "index"):
            for permit in stack.enter_context(held(semaphore(name, slots=3), 2)):
                permit.on_stop_requested(lambda asked: asked.release())
        yield


#: What the scratch project cannot give: a server of another kind, a second hit of an act, a look that ends by itself.
ELSEWHERE = {
    "sql": "tests/backends/applock/test_procedures.py",
    "--watch": "tests/unit/test_locks_command.py",
    "--kill": "tests/backends/applock/test_operator.py",
    "--token": "tests/unit/test_stopping_commands.py",
}


@pytest.mark.parametrize("line", locks_commands())
def test_commands_run(line: str, site: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)[3:]
    if found := [tested for option, tested in ELSEWHERE.items() if option in words]:
        assert (ROOT / found[0]).exists()
        return
    with contextlib.suppress(SystemExit):
        call_command("locks", *words)
    print(capsys.readouterr())
