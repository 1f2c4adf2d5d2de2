"""Asks holders to stop. Nothing is taken from them: they decide when they leave."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_sqlsem import control
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console


def add_arguments(parser: CommandParser) -> None:
    arguments.add_name(parser)
    arguments.add_slot(parser)
    parser.add_argument("--token", metavar="TOKEN", type=int, help="only if its holder still has this token")
    arguments.add_reason(parser)


def handle(
    console: Console, *, name: str, slot: int | None, token: int | None, reason: str, database: str | None, **_: Any
) -> None:
    """Ask the holders, and say whom."""
    if token is not None and slot is None:
        raise CommandError("A token belongs to a slot: give --slot too.", returncode=2)
    console.known(name, database)
    try:
        asked = control.request_stop(name, slot, token, by=console.by, using=database, reason=reason)
    except BackendError:
        raise
    except SemaphoreError as error:
        raise CommandError(output.clean(str(error))) from error
    which = output.which(name, slot)
    if asked:
        console.done(f"Asked to stop ({output.count(len(asked), 'holder')}):")
        console.lines(map(output.sentence, asked), "  ")
        console.say("Nothing was taken from them: they keep their slots until they leave.")
    elif token is not None:
        raise CommandError(f"{token} is not the token of {which} any more: the holder of now was not asked.")
    else:
        console.say(f"Nobody holds {which}: no holder was asked.")
