"""Asks holders to stop. Nothing is taken from them: they decide when they leave."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext, ngettext

from django_sqlsem import control
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console


def add_arguments(parser: CommandParser) -> None:
    arguments.add_name(parser)
    arguments.add_slot(parser)
    told = gettext("only if its holder still has this token")
    parser.add_argument("--token", metavar="TOKEN", type=int, help=told)
    arguments.add_reason(parser)


def handle(
    console: Console, *, name: str, slot: int | None, token: int | None, reason: str, database: str | None, **_: Any
) -> None:
    """Ask the holders, and say whom."""
    if token is not None and slot is None:
        raise CommandError(gettext("A token belongs to a slot: give --slot too."), returncode=2)
    console.known(name, database)
    try:
        asked = control.request_stop(name, slot, token, by=console.by, using=database, reason=reason)
    except BackendError:
        raise
    except SemaphoreError as error:
        raise CommandError(output.clean(str(error))) from error
    which = output.which(name, slot)
    if asked:
        told = ngettext("Asked to stop (%(count)d holder):", "Asked to stop (%(count)d holders):", len(asked))
        console.done(told % {"count": len(asked)})
        console.lines(map(output.sentence, asked), "  ")
        console.say(gettext("Nothing was taken from them: they keep their slots until they leave."))
    elif token is not None:
        told = gettext("%(token)d is not the token of %(which)s any more: the holder of now was not asked.")
        raise CommandError(told % {"token": token, "which": which})
    else:
        console.say(gettext("Nobody holds %(which)s: no holder was asked.") % {"which": which})
