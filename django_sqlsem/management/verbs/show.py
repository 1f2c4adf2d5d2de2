"""Shows all about one semaphore."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_sqlsem import queries
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console


def add_arguments(parser: CommandParser) -> None:
    arguments.add_name(parser)
    arguments.add_format(parser, "table", "json")


def handle(console: Console, *, name: str, format: str, database: str | None, **_: Any) -> None:  # noqa: A002
    """Print all about one name."""
    snapshot = console.known(name, database)
    values = [each for each in queries.refreshes(using=database) if each.name == snapshot.name]
    if format == "json":
        console.say(output.as_json([snapshot], values, using=database, whole=False, only=True))
    else:
        console.heading(output.summary(snapshot))
        console.lines([*output.details(snapshot), *output.refresh_table(values)])
