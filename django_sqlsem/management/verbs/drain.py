"""Grants nothing more until it is resumed, and asks all holders to stop."""

from __future__ import annotations

import time
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db import close_old_connections
from django.utils.translation import gettext, ngettext

from django_sqlsem import control, queries
from django_sqlsem.core.durations import UNSET, Unset
from django_sqlsem.core.durations import duration as duration_text
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console
from django_sqlsem.snapshots import HolderSnapshot

#: How often a drain looks whether the holders have left, in seconds.
_LOOK_EVERY: Final = 0.5


def add_arguments(parser: CommandParser) -> None:
    arguments.add_name(parser)
    told = gettext("wait so long for the holders to leave: 90s, 15m, none (for ever); default: not at all")
    parser.add_argument("--wait", metavar="AGE", type=arguments.timeout, default=UNSET, help=told)
    arguments.add_duration(parser)
    arguments.add_reason(parser)


def handle(
    console: Console,
    *,
    name: str,
    wait: float | Unset | None,
    duration: float | None,
    reason: str,
    database: str | None,
    **_: Any,
) -> None:
    """Pause it, ask the holders to stop, and wait for them if that is wanted."""
    console.known(name, database)
    shown, by = output.clean(name), console.by
    if not control.drain(name, by=by, using=database, duration=duration, reason=reason):
        raise CommandError(gettext("%(name)s was purged meanwhile.") % {"name": repr(shown)})
    console.say(gettext("%(name)s is paused, and its holders are asked to stop.") % {"name": shown})
    left = _wait_for(name, by, 0.0 if isinstance(wait, Unset) else wait, database)
    console.lines(map(output.sentence, left), "  ")
    if left and not isinstance(wait, Unset):
        told = ngettext(
            "%(count)d holder has not left within %(seconds)g s. It stays paused.",
            "%(count)d holders have not left within %(seconds)g s. It stays paused.",
            len(left),
        )
        raise CommandError(told % {"count": len(left), "seconds": wait}, returncode=arguments.EXIT_BUSY)
    if left:
        told = ngettext("%(count)d holder has not left yet.", "%(count)d holders have not left yet.", len(left))
        console.say(told % {"count": len(left)})
    else:
        console.done(gettext("It is drained: nobody holds it."))
    verb = f"`locks set {shown} --resume`"
    if duration is None:
        console.say(gettext("Nothing more is granted until %(command)s.") % {"command": verb})
    else:
        told = gettext("Nothing more is granted for %(length)s, or until %(command)s.")
        console.say(told % {"length": duration_text(duration), "command": verb})


def _wait_for(name: str, by: str, wait: float | None, database: str | None) -> list[HolderSnapshot]:
    """Return the holders that have not left after this many seconds."""
    give_up = float("inf") if wait is None else time.monotonic() + wait
    while True:
        found = queries.semaphore(name, using=database)
        left = [holder for holder in found.holders if not holder.expired] if found else []
        # A grant that was under way when it was paused.
        for holder in left:
            if holder.recorded and not holder.stop_requested:
                control.request_stop(name, holder.slot, holder.token, by=by, using=database)
        now = time.monotonic()
        if not left or now >= give_up:
            return left
        time.sleep(min(_LOOK_EVERY, give_up - now))
        close_old_connections()
