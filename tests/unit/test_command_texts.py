"""The command speaks the language of the site: every text that it prints for people can be translated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError
from django.utils import translation

import django_sqlsem
from django_sqlsem.management import verbs
from tests.support.operators import hold, locks, make_semaphore, wait

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]

SOURCES = Path(django_sqlsem.__file__).parent / "management"
KEYWORDS = {"gettext": None, "gettext_lazy": None, "gettext_noop": None, "ngettext": (1, 2), "pgettext": ((1, "c"), 2)}
KEYWORDS["pgettext_lazy"] = KEYWORDS["pgettext"]
#: What is not a text but data of the tests, an argument, a unit, or argparse's own.
NOT_TEXTS = {
    "reports",
    "web",
    "pid",
    "MainThread",
    "GET",
    "ann",
    "host",
    "min",
    "sync",
    "request",
    "user",
    "pk",
    "worker",
    "UTC",
    "ops",
    "night",
    "locks",
    "set",
    "resume",
    "show",
    "list",
    "other",
    "manage",
    "py",
    "bob",
    "wait",
}


def foreign(text: str) -> str:
    """The text in a language whose letters are not ASCII; placeholders stay as they are."""
    parts = re.split(r"(%\(\w+\)[sdg]|%s)", text)
    return "".join(part if part.startswith("%") else re.sub("[A-Za-z]", "ж", part) for part in parts)


def extracted() -> Any:
    extract = pytest.importorskip("babel.messages.extract")
    for path in sorted(SOURCES.rglob("*.py")):
        with path.open("rb") as file:
            for _line, message, _comments, context in extract.extract("python", file, KEYWORDS, (), {}):
                yield message, context


@pytest.fixture
def in_a_foreign_language(settings, tmp_path):
    catalogue = pytest.importorskip("babel.messages.catalog").Catalog(locale="ru")
    for message, context in extracted():
        many = isinstance(message, tuple)
        told = [foreign(message[0]), *[foreign(message[1])] * 2] if many else foreign(message)
        catalogue.add(message, told, context=context)
    folder = tmp_path / "ru" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    with (folder / "django.mo").open("wb") as file:
        pytest.importorskip("babel.messages.mofile").write_mo(file, catalogue)
    settings.LOCALE_PATHS = [tmp_path]
    with translation.override("ru"):
        yield
    translation.trans_real._translations.pop("ru", None)


def english(text: str) -> set[str]:
    """The words that were not translated."""
    return set(re.findall(r"[A-Za-z]{2,}", re.sub(r"'[^']*'|`[^`]*`|--[a-z-]+|[\w.]+@[\w.-]+", " ", text))) - NOT_TEXTS


def printed(capsys: Any, *arguments: str) -> str:
    try:
        locks(*arguments)
    except (CommandError, SystemExit) as error:
        return str(error) + "".join(capsys.readouterr())
    return str(capsys.readouterr().out)


def test_what_the_command_prints_is_translated(database: str, capsys: Any, in_a_foreign_language: None) -> None:
    make_semaphore(database)
    make_semaphore(database, "other", slots=2, operator_slots=5)
    make_semaphore(database, "sync", slots=1, template="sync:{request.user.pk}")
    hold(database, "sync")
    wait(database, "sync")
    hold(database, slot=1)
    hold(database, slot=2, left=-20, age=80)
    wait(database)
    for arguments in (
        ["list"],
        ["list", "--stale"],
        ["list", "--stale", "--name", "z*"],
        ["list", "--name", "z*"],
        ["list", "--name", "other"],
        ["show", "reports"],
        ["show", "other"],
        ["show", "zz"],
        ["show", "report"],
        ["waits"],
        ["purge", "--dry-run", "--idle"],
        ["stop", "reports"],
        ["stop", "other"],
        ["stop", "reports", "--token", "9"],
        ["stop", "reports", "--token", "9", "--slot", "1"],
        ["set", "other", "--pause", "--for", "30m", "--reason", "night"],
        ["set", "other", "--slots", "1"],
        ["set", "other", "--slots", "1", "--for", "1h"],
        ["list"],
        ["show", "other"],
        ["set", "other", "--resume"],
        ["drain", "reports", "--wait", "0.1"],
        ["drain", "reports", "--for", "2h"],
        ["revoke", "other"],
        ["revoke", "reports", "--slot", "1"],
        ["revoke", "reports", "--noinput"],
        ["drain", "other"],
        ["purge", "--noinput", "--idle"],
        ["purge"],
        ["list"],
        ["sql"],
        ["run", "reports"],
        ["doctor", "--no-acquire"],
    ):
        out = printed(capsys, *arguments, "--database", database)
        if arguments[0] == "doctor":  # its findings are those of the system checks, which developers read
            out = "\n".join([out.splitlines()[0], out.splitlines()[-1]])
            out = out.replace(repr(database), "")
        assert out.strip(), arguments
        assert not english(out), (arguments, out)


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_the_help_is_translated(verb: str, capsys: Any, in_a_foreign_language: None) -> None:
    with pytest.raises(SystemExit):
        locks(verb, "--help")
    out = capsys.readouterr().out
    ours = out[out.index("\n\n") : out.index("options:")] + out[out.index("жжжж жжжжж:") :]
    told = [line[24:] for line in out[out.index("options:") :].splitlines() if line.startswith(" " * 24)]
    argparses = {"show", "this", "help", "message", "and", "exit", "positional", "arguments", "NAME", "COMMAND"}
    assert not english(ours + "\n".join(told)) - argparses


def test_the_texts_for_programs_are_not_translated(database: str, capsys: Any, in_a_foreign_language: None) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    wait(database)
    assert '"state": "held"' in printed(capsys, "list", "--format", "json", "--database", database)
    assert ",held," in printed(capsys, "list", "--format", "csv", "--database", database)
    assert ",waiting," in printed(capsys, "list", "--format", "csv", "--database", database)


def test_each_text_keeps_its_placeholders() -> None:
    """Positions of words differ among languages: a text with two values names them."""
    for message, _context in extracted():
        for text in message if isinstance(message, tuple) else (message,):
            assert len(re.findall(r"%[sd]", text)) <= 1, text
            assert "{" not in text or "request" in text, text
