"""What operators set for a name as a whole: its number of slots, a pause, and a drain."""

from __future__ import annotations

import time
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db import close_old_connections
from django.utils.translation import gettext, gettext_noop, ngettext

from django_sqlsem import control, queries
from django_sqlsem.core.durations import UNSET, Unset, duration
from django_sqlsem.management import arguments, output
from django_sqlsem.management.verbs import Verb
from django_sqlsem.snapshots import HolderSnapshot

#: How often a drain looks whether the holders have left, in seconds.
_LOOK_EVERY: Final = 0.5


def _purged(name: str) -> CommandError:
    return CommandError(gettext("%(name)s was purged meanwhile.") % {"name": repr(output.clean(name))})


def _slots_or_default(text: str) -> Any:
    return None if text == "default" else arguments.slots(text)


class Set(Verb):
    help = gettext_noop("Sets the number of slots, or stops and resumes granting.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        arguments.add_name(parser)
        what = parser.add_mutually_exclusive_group(required=True)
        told = gettext("a number, or 'default': as in the code")
        what.add_argument("--slots", metavar="N", type=_slots_or_default, default=UNSET, help=told)
        what.add_argument("--pause", action="store_true", help=gettext("grant nothing more; holders are not disturbed"))
        what.add_argument("--resume", action="store_true", help=gettext("grant again"))
        arguments.add_duration(parser)
        arguments.add_reason(parser)

    def handle(self) -> None:
        """Change one semaphore, and say how it stands."""
        given, lasts = self.given, self.given.duration
        if lasts is not None and (given.resume or (not given.pause and given.slots is None)):
            raise CommandError(gettext("--for is of a pause or a number of slots: give one of them."), returncode=2)
        before = None if given.slots is UNSET else self.known()
        who: dict[str, Any] = {"by": self.by, "using": given.database, "reason": given.reason}
        try:
            if given.pause:
                done = control.pause(given.name, duration=lasts, **who)
            elif given.resume:
                done = control.resume(given.name, **who)
            else:
                done = control.set_slots(given.name, given.slots, duration=lasts, **who)
        except ValueError as error:
            raise CommandError(str(error)) from error
        snapshot = self.known()
        if not done:
            raise _purged(given.name)
        self.done(output.summary(snapshot))
        if before is not None and before.operator_slots is not None:
            told = gettext("Before: %(slots)s, %(sized)s.")
            self.say(told % {"slots": output.count_slots(before.operator_slots), "sized": output.sized(before)})
        if snapshot.held > snapshot.slots:
            self.say(gettext("No holder is interrupted; nothing is granted until fewer are held."))
        if given.pause and lasts is None:
            self.say(gettext("Nothing more is granted until `--resume`; holders are not disturbed."))
        elif lasts is not None:
            told = gettext("In %(length)s the code's number counts again, by itself.")
            if given.pause:
                told = gettext(
                    "Nothing more is granted for %(length)s, or until `--resume`; holders are not disturbed."
                )
            self.say(told % {"length": duration(lasts)})


class Drain(Verb):
    help = gettext_noop("Grants nothing more until it is resumed, and asks all holders to stop.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        arguments.add_name(parser)
        told = gettext("wait so long for the holders to leave: 90s, 15m, none (for ever); default: not at all")
        parser.add_argument("--wait", metavar="AGE", type=arguments.timeout, default=UNSET, help=told)
        arguments.add_duration(parser)
        arguments.add_reason(parser)

    def handle(self) -> None:
        """Pause it, ask the holders to stop, and wait for them if that is wanted."""
        self.known()
        name, wait, lasts = self.given.name, self.given.wait, self.given.duration
        shown, waits = output.clean(name), not isinstance(wait, Unset)
        using, reason = self.given.database, self.given.reason
        if not control.drain(name, by=self.by, using=using, duration=lasts, reason=reason):
            raise _purged(name)
        self.say(gettext("%(name)s is paused, and its holders are asked to stop.") % {"name": shown})
        left = self._left_after(wait if waits else 0.0)
        self.lines(map(output.sentence, left), "  ")
        if left and waits:
            told = ngettext(
                "%(count)d holder has not left within %(seconds)g s. It stays paused.",
                "%(count)d holders have not left within %(seconds)g s. It stays paused.",
                len(left),
            )
            raise CommandError(told % {"count": len(left), "seconds": wait}, returncode=arguments.EXIT_BUSY)
        if left:
            told = ngettext("%(count)d holder has not left yet.", "%(count)d holders have not left yet.", len(left))
            self.say(told % {"count": len(left)})
        else:
            self.done(gettext("It is drained: nobody holds it."))
        told = gettext("Nothing more is granted until %(command)s.")
        if lasts is not None:
            told = gettext("Nothing more is granted for %(length)s, or until %(command)s.")
        self.say(told % {"length": duration(lasts or 0.0), "command": f"`locks set {shown} --resume`"})

    def _left_after(self, wait: float | None) -> list[HolderSnapshot]:
        """Return the holders that have not left after this many seconds."""
        name, using = self.given.name, self.given.database
        give_up = float("inf") if wait is None else time.monotonic() + wait
        while True:
            found = queries.semaphore(name, using=using)
            left = [holder for holder in found.holders if not holder.expired] if found else []
            # A grant that was under way when it was paused.
            for holder in left:
                if holder.recorded and not holder.stop_requested:
                    control.request_stop(name, holder.slot, holder.token, by=self.by, using=using)
            now = time.monotonic()
            if not left or now >= give_up:
                return left
            time.sleep(min(_LOOK_EVERY, give_up - now))
            close_old_connections()
