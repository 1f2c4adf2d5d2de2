"""Takes slots away from their holders, live ones too. They learn that their permit is lost."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext, ngettext

from django_sqlsem import control, queries
from django_sqlsem.exceptions import kill_needed
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console


def add_arguments(parser: CommandParser) -> None:
    arguments.add_name(parser)
    arguments.add_slot(parser)
    told = gettext("SQL Server: end the holders' sessions, with all they hold")
    parser.add_argument("--kill", action="store_true", help=told)
    arguments.add_reason(parser)
    arguments.add_noinput(parser)


def handle(
    console: Console, *, name: str, slot: int | None, kill: bool, reason: str, interactive: bool, database: str | None,
    **_: Any,
) -> None:  # fmt: skip
    """Name the holders, and what goes with them; ask, and take the slots from just those."""
    shown = [each for each in console.known(name, database).holders if slot is None or slot in each.numbers]
    if not shown:
        told = gettext("Nobody holds %(which)s: nothing to revoke.")
        console.say(told % {"which": output.which(name, slot)})
        return
    console.say(gettext("To be revoked (%(slots)s):") % {"slots": output.count_slots(len(shown))})
    console.lines(map(output.sentence, shown), "  ")
    for holder in shown:
        if holder.needs_kill and (not kill or holder.session_id is None):
            raise CommandError(f"{output.clean(str(kill_needed(holder)))} {gettext('Nothing was changed.')}")
    if others := queries.held_along(shown, using=database):
        told = gettext("To be lost as well, as the same sessions hold it (%(slots)s):")
        console.say(told % {"slots": output.count_slots(len(others))})
        console.lines(map(output.sentence, others), "  ")
    if not console.agreed(interactive):
        return
    how: dict[str, Any] = {"by": console.by, "using": database, "kill": kill, "reason": reason}
    changed = [holder.place for holder in shown if not control.revoke(name, holder.slot, holder.token, **how)]
    console.done(gettext("Revoked %(slots)s.") % {"slots": output.count_slots(len(shown) - len(changed))})
    if changed:
        told = ngettext(
            "The holder of slot %(slots)s has changed since: the new one was not disturbed.",
            "The holders of slots %(slots)s have changed since: the new ones were not disturbed.",
            len(changed),
        )
        raise CommandError(told % {"slots": ", ".join(changed)})
