"""``manage.py locks doctor``: its arguments, and what it prints."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.doctor.examination import examine, worst
from django_sqlsem.doctor.findings import Finding, Level
from django_sqlsem.management import output

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

#: How wide sentences are printed.
WIDTH: Final = 100
_INDENT: Final = " " * 9


def add_arguments(parser: CommandParser) -> None:
    """Declare what the doctor takes besides the alias."""
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--no-acquire", action="store_false", dest="acquire", help="take no lock, kill no child")


def run(
    *,
    database: str | None,
    form: str,
    acquire: bool,
    write: Callable[[str], object],
    colour: Callable[..., str],
) -> bool:
    """Examine, print as findings come, and return whether there is no error."""
    found: list[Finding] = []
    where = None
    for finding in examine(database, acquire=acquire):
        found.append(finding)
        if form == "text":
            if finding.database != where:
                where = finding.database
                write(f"Database {where!r}:" if where else "Settings:")
            for line in _lines(finding, colour):
                write(line)
    if form == "json":
        write(json.dumps([each.as_dict() for each in found], indent=2))
    else:
        write(_summary(found))
    return worst(found) < Level.ERROR.rank


def _lines(finding: Finding, colour: Callable[..., str]) -> Iterable[str]:
    text = output.clean(finding.text)
    width = WIDTH - len(_INDENT)
    first, *more = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    yield colour(finding.level, f"{finding.level.value:<9}") + first
    for line in more:
        yield _INDENT + line
    if finding.level is not Level.OK:
        told = output.clean(finding.advice)
        if "docs/" not in told:
            told = f"{told} See {finding.docs}."
        for line in textwrap.wrap(told.strip(), width, break_long_words=False, break_on_hyphens=False):
            yield _INDENT + line


def _summary(found: list[Finding]) -> str:
    counts = [sum(each.level is level for each in found) for level in (Level.ERROR, Level.WARNING, Level.NOTE)]
    words = (("error", "errors"), ("warning", "warnings"), ("note", "notes"))
    told = [output.count(number, *pair) for number, pair in zip(counts, words, strict=True) if number]
    return f"Found {', '.join(told)}." if told else "All is well."


def colours(style: Any) -> Callable[[Level, str], str]:
    """Return how the command colours a level."""
    styles = {Level.ERROR: style.ERROR, Level.WARNING: style.WARNING, Level.NOTE: style.NOTICE, Level.OK: style.SUCCESS}

    def colour(level: Level, text: str) -> str:
        return str(styles[level](text))

    return colour
