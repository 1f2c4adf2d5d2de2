"""Grants nothing more until it is resumed, and asks all holders to stop."""

from __future__ import annotations

import time
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db import close_old_connections

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
    told = "wait so long for the holders to leave: 90s, 15m, none (for ever); default: not at all"
    parser.add_argument("--wait", metavar="AGE", type=arguments.timeout, default=UNSET, help=told)
    arguments.add_pause(parser)
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
        raise CommandError(f"{shown!r} was purged meanwhile.")
    console.say(f"{shown} is paused, and its holders are asked to stop.")
    left = _wait_for(name, by, 0.0 if isinstance(wait, Unset) else wait, database)
    console.lines(map(output.sentence, left), "  ")
    still = f"{output.count(len(left), 'holder has', 'holders have')} not left"
    if left and not isinstance(wait, Unset):
        raise CommandError(f"{still} within {wait:g} s. It stays paused.", returncode=arguments.EXIT_BUSY)
    if left:
        console.say(f"{still} yet.")
    else:
        console.done("It is drained: nobody holds it.")
    until = "" if duration is None else f"for {duration_text(duration)}, or "
    console.say(f"Nothing more is granted {until}until `locks set {shown} --resume`.")


def _wait_for(name: str, by: str, wait: float | None, database: str | None) -> list[HolderSnapshot]:
    """Return the holders that have not left after so many seconds."""
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
