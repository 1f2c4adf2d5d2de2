"""Sets the number of slots, or stops and resumes granting."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext

from django_sqlsem import control
from django_sqlsem.core import durations
from django_sqlsem.core.durations import UNSET
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console


def _slots_or_default(text: str) -> Any:
    return None if text == "default" else arguments.slots(text)


def add_arguments(parser: CommandParser) -> None:
    arguments.add_name(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    told = gettext("a number, or 'default': as in the code")
    what.add_argument("--slots", metavar="N", type=_slots_or_default, default=UNSET, help=told)
    what.add_argument("--pause", action="store_true", help=gettext("grant nothing more; holders are not disturbed"))
    what.add_argument("--resume", action="store_true", help=gettext("grant again"))
    arguments.add_duration(parser)
    arguments.add_reason(parser)


def handle(
    console: Console,
    *,
    name: str,
    slots: Any,
    pause: bool,
    resume: bool,
    duration: float | None,
    reason: str,
    database: str | None,
    **_: Any,
) -> None:
    """Change one semaphore."""
    if duration is not None and (resume or (not pause and slots is None)):
        raise CommandError(gettext("--for is of a pause or a number of slots: give one of them."), returncode=2)
    who: dict[str, Any] = {"by": console.by, "using": database, "reason": reason}
    before = None if slots is UNSET else console.known(name, database)
    try:
        if pause:
            done = control.pause(name, duration=duration, **who)
        elif resume:
            done = control.resume(name, **who)
        else:
            done = control.set_slots(name, slots, duration=duration, **who)
    except ValueError as error:
        raise CommandError(str(error)) from error
    snapshot = console.known(name, database)
    if not done:
        raise CommandError(gettext("%(name)s was purged meanwhile.") % {"name": repr(output.clean(name))})
    console.done(output.summary(snapshot))
    if before is not None and before.operator_slots is not None:
        told = gettext("Before: %(slots)s, %(sized)s.")
        console.say(told % {"slots": output.count_slots(before.operator_slots), "sized": output.sized(before)})
    if snapshot.held > snapshot.slots:
        console.say(gettext("No holder is interrupted; nothing is granted until fewer are held."))
    if pause:
        told = gettext("Nothing more is granted until `--resume`; holders are not disturbed.")
        if duration is not None:
            told = gettext("Nothing more is granted for %(length)s, or until `--resume`; holders are not disturbed.")
        console.say(told % {"length": durations.duration(duration or 0.0)})
    elif duration is not None:
        told = gettext("In %(length)s the code's number counts again, by itself.")
        console.say(told % {"length": durations.duration(duration)})
