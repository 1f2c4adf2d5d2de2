"""SQL Server: prints the stored procedures that take and give back locks, for a DBA who installs them by hand."""

from __future__ import annotations

import re
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext

from django_sqlsem import control
from django_sqlsem.management import arguments
from django_sqlsem.management.console import Console

#: Those procedures that batches make or remove, and that are for everybody.
_PROCEDURE = re.compile(r"^(?:ALTER|DROP) PROCEDURE (?:IF EXISTS )?(\w+\.(?!internal)\w+)", re.MULTILINE)


def add_arguments(parser: CommandParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--apply", action="store_true", help=gettext("install them"))
    what.add_argument("--drop", action="store_true", help=gettext("remove them"))
    arguments.add_noinput(parser)


def handle(console: Console, *, apply: bool, drop: bool, interactive: bool, database: str | None, **_: Any) -> None:
    """Print a script for sqlcmd or Management Studio; or say what will be done, ask, and do it."""
    batches = control.procedures(drop=drop, using=database)
    if not batches:
        raise CommandError(gettext("Nothing to do: these are for semaphores on SQL Server's application locks."))
    if not apply and not drop:
        console.say("\nGO\n".join(batch.rstrip("\n") for batch in (*batches, "")))
        return
    names = ", ".join(sorted(_PROCEDURE.findall("\n".join(batches))))
    told = gettext("To be installed in the database: %(names)s, and what Django itself uses.")
    if drop:
        told = gettext(
            "To be removed from the database: %(names)s, and what Django itself uses. Afterwards no process can take a"
            " lock."
        )
    console.say(told % {"names": names})
    if console.agreed(interactive):
        control.change_procedures(drop=drop, by=console.by, using=database)
        console.done(gettext("Removed.") if drop else gettext("Installed."))
