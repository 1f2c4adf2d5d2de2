"""Frees slots whose lease has run out, or whose session has ended. Never touches a live holder."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext

from django_sqlsem import control
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console


def add_arguments(parser: CommandParser) -> None:
    told = gettext("also delete names that nobody holds or waits for")
    parser.add_argument("--idle", action="store_true", help=told)
    told = gettext("only leases that ran out, and names last granted, so long ago: 2h")
    parser.add_argument("--older-than", metavar="AGE", type=arguments.age, help=told)
    arguments.add_glob(parser)
    parser.add_argument("--dry-run", action="store_true", help=gettext("only say what would be done"))
    arguments.add_reason(parser)
    arguments.add_noinput(parser)


def handle(
    console: Console, *, idle: bool, older_than: float | None, name_glob: str | None, dry_run: bool, reason: str,
    interactive: bool, database: str | None, **_: Any,
) -> None:  # fmt: skip
    """Say what would be purged, ask, and do just that."""
    plan = control.plan_purge(idle=0 if idle else None, older_than=older_than, name_glob=name_glob, using=database)
    console.lines(output.plan(plan))
    if not plan:
        console.say(gettext("Nothing to purge."))
    elif dry_run:
        console.say(gettext("Dry run: nothing was changed."))
    elif console.agreed(interactive):
        done = control.execute_purge(plan, by=console.by, reason=reason)
        counts = {"slots": output.count_slots(len(done.freed)), "names": output.count_names(len(done.deleted))}
        console.done(gettext("Freed %(slots)s, deleted %(names)s.") % counts)
        changed, in_use = gettext("Not touched, it has changed: %s"), gettext("Not deleted, it is in use: %s")
        console.lines((changed % output.sentence(holder) for holder in done.changed), "  ")
        console.lines((in_use % output.clean(name) for name in done.in_use), "  ")
