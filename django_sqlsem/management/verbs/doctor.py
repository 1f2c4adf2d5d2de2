"""``manage.py locks doctor``: its arguments, and what it prints."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandParser

from django_sqlsem.checks.doctor.examination import examine, worst
from django_sqlsem.checks.doctor.findings import Finding, Level
from django_sqlsem.management import output

#: How wide sentences are printed.
WIDTH: Final = 100
_INDENT: Final = " " * 9


def add_arguments(parser: CommandParser) -> None:
    """Declare what the doctor takes besides the alias."""
    parser.add_argument("--format", choices=["text", "json"], default="text")
    parser.add_argument("--no-acquire", action="store_false", dest="acquire", help="take no lock, kill no child")


class DoctorVerb(BaseCommand):
    """``locks doctor``."""

    def handle_doctor(self, *, database: str | None, format: str, acquire: bool, **_: Any) -> None:  # noqa: A002
        """Examine, print findings as they come, and end with 1 if one is an error."""
        found: list[Finding] = []
        where = None
        for finding in examine(database, acquire=acquire):
            found.append(finding)
            if format == "text":
                if finding.database != where:
                    where = finding.database
                    self._say(f"Database {where!r}:" if where else "Settings:")
                self._say(*_lines(finding, self._coloured))
        if format == "json":
            self._say(json.dumps([each.as_dict() for each in found], indent=2))
        else:
            self._say(_summary(found))
        if worst(found) >= Level.ERROR.rank:
            sys.exit(1)

    def _coloured(self, level: Level, text: str) -> str:
        style: Any = self.style
        styles = {Level.ERROR: style.ERROR, Level.WARNING: style.WARNING, Level.NOTE: style.NOTICE}
        return str(styles.get(level, style.SUCCESS)(text))

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.stdout.write(output.encodable(line, getattr(self.stdout, "encoding", None) or "utf-8"))
        self.stdout.flush()  # some of what comes takes a while


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
