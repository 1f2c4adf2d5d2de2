"""Examines the settings and each database that keeps locks, and says what it finds."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any, Final

from django.core.checks import DEBUG, ERROR, INFO, WARNING, CheckMessage
from django.core.management.base import CommandParser
from django.utils.translation import gettext, ngettext, pgettext

from django_sqlsem.checks import doctor
from django_sqlsem.core.text import check_page
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console

#: What the levels of Django's messages are called in JSON, and their colours.
LEVEL_WORDS: Final = {ERROR: "error", WARNING: "warning", INFO: "note", DEBUG: "ok"}
_STYLES: Final = {ERROR: "ERROR", WARNING: "WARNING", INFO: "NOTICE", DEBUG: "SUCCESS"}
#: How wide sentences are printed, and how far in.
_WIDTH: Final = 100
_INDENT: Final = " " * 9


def add_arguments(parser: CommandParser) -> None:
    arguments.add_database(parser, "--using")
    arguments.add_format(parser, "text", "json")
    parser.add_argument(
        "--no-acquire", action="store_false", dest="acquire", help=gettext("take no lock, kill no child")
    )


def handle(console: Console, *, database: str | None, format: str, acquire: bool, **_: Any) -> None:  # noqa: A002
    """Examine, print what is found as it is found, and end with 1 if one is an error."""
    found: list[CheckMessage] = []
    for message in doctor.examine(database, acquire=acquire):
        if format == "text":
            if not found or message.obj != found[-1].obj:
                told = gettext("Database %(alias)s:") if message.obj else gettext("Settings:")
                console.say(told % {"alias": repr(message.obj)})
            _print(console, message)
            console.stdout.flush()  # some of what comes takes a while
        found.append(message)
    if format == "json":
        console.say(json.dumps([as_dict(each) for each in found], indent=2))
    else:
        console.say(_summary(found))
    if any(each.level >= ERROR for each in found):
        sys.exit(1)


def _summary(found: list[CheckMessage]) -> str:
    errors, warnings, notes = (sum(each.level == level for each in found) for level in (ERROR, WARNING, INFO))
    told = []
    if errors:
        told.append(ngettext("%(count)d error", "%(count)d errors", errors) % {"count": errors})
    if warnings:
        told.append(ngettext("%(count)d warning", "%(count)d warnings", warnings) % {"count": warnings})
    if notes:
        told.append(ngettext("%(count)d note", "%(count)d notes", notes) % {"count": notes})
    return gettext("Found %(what)s.") % {"what": ", ".join(told)} if told else gettext("All is well.")


def _level(level: int) -> str:
    words = {
        ERROR: pgettext("level", "error"),
        WARNING: pgettext("level", "warning"),
        INFO: pgettext("level", "note"),
        DEBUG: pgettext("level", "ok"),
    }
    return words[level]


def _print(console: Console, message: CheckMessage) -> None:
    level = getattr(console.style, _STYLES[message.level])(f"{_level(message.level):<9}")
    first, *more = [
        line
        for text in (message.msg, message.hint or "")
        for line in textwrap.wrap(
            output.clean(str(text)), _WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False
        )
    ]
    console.say(f"{level}{first}")
    console.lines(more, _INDENT)


def as_dict(message: CheckMessage) -> dict[str, Any]:
    """Return a message for programs."""
    return {
        "id": message.id,
        "level": LEVEL_WORDS[message.level],
        "database": message.obj or "",
        "text": str(message.msg),
        "advice": (message.hint or "").rpartition("See ")[0].strip(),
        "docs": check_page(message.id or ""),
    }
