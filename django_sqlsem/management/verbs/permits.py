"""What operators do to permits: free stale slots, take slots away, and ask holders to stop."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext, gettext_noop, ngettext

from django_sqlsem import control, queries
from django_sqlsem.exceptions import BackendError, SemaphoreError, kill_needed
from django_sqlsem.management import arguments, output
from django_sqlsem.management.verbs import Verb


class Purge(Verb):
    help = gettext_noop("Frees slots whose lease has run out, or whose session has ended. Never touches a live holder.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        told = gettext("also delete names that nobody holds or waits for")
        parser.add_argument("--idle", action="store_true", help=told)
        told = gettext("only leases that ran out, and names last granted, so long ago: 2h")
        parser.add_argument("--older-than", metavar="AGE", type=arguments.age, help=told)
        arguments.add_glob(parser)
        parser.add_argument("--dry-run", action="store_true", help=gettext("only say what would be done"))
        arguments.add_reason(parser)
        arguments.add_noinput(parser)

    def handle(self) -> None:
        """Say what would be purged, ask, and do just that."""
        given = self.given
        plan = control.plan_purge(
            idle=0 if given.idle else None,
            older_than=given.older_than,
            name_glob=given.name_glob,
            using=given.database,
        )
        self.lines(output.plan(plan))
        if not plan:
            self.say(gettext("Nothing to purge."))
        elif given.dry_run:
            self.say(gettext("Dry run: nothing was changed."))
        elif self.agreed():
            done = control.execute_purge(plan, by=self.by, reason=given.reason)
            counts = {"slots": output.count_slots(len(done.freed)), "names": output.count_names(len(done.deleted))}
            self.done(gettext("Freed %(slots)s, deleted %(names)s.") % counts)
            changed, in_use = gettext("Not touched, it has changed: %s"), gettext("Not deleted, it is in use: %s")
            self.lines((changed % output.sentence(holder) for holder in done.changed), "  ")
            self.lines((in_use % output.clean(name) for name in done.in_use), "  ")


class Revoke(Verb):
    help = gettext_noop("Takes slots away from their holders, live ones too. They learn that their permit is lost.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        arguments.add_name(parser)
        arguments.add_slot(parser)
        told = gettext("SQL Server: end the holders' sessions, with all they hold")
        parser.add_argument("--kill", action="store_true", help=told)
        arguments.add_reason(parser)
        arguments.add_noinput(parser)

    def handle(self) -> None:
        """Name the holders, and what goes with them; ask, and take the slots from just those."""
        name, slot, kill, using = self.given.name, self.given.slot, self.given.kill, self.given.database
        shown = [each for each in self.known().holders if slot is None or slot in each.numbers]
        if not shown:
            told = gettext("Nobody holds %(which)s: nothing to revoke.")
            self.say(told % {"which": output.which(name, slot)})
            return
        self.say(gettext("To be revoked (%(slots)s):") % {"slots": output.count_slots(len(shown))})
        self.lines(map(output.sentence, shown), "  ")
        for holder in shown:
            if holder.needs_kill and (not kill or holder.session_id is None):
                raise CommandError(f"{output.clean(str(kill_needed(holder)))} {gettext('Nothing was changed.')}")
        if others := queries.held_along(shown, using=using):
            told = gettext("To be lost as well, as the same sessions hold it (%(slots)s):")
            self.say(told % {"slots": output.count_slots(len(others))})
            self.lines(map(output.sentence, others), "  ")
        if not self.agreed():
            return
        how: dict[str, Any] = {"by": self.by, "using": using, "kill": kill, "reason": self.given.reason}
        changed = [holder.place for holder in shown if not control.revoke(name, holder.slot, holder.token, **how)]
        self.done(gettext("Revoked %(slots)s.") % {"slots": output.count_slots(len(shown) - len(changed))})
        if changed:
            told = ngettext(
                "The holder of slot %(slots)s has changed since: the new one was not disturbed.",
                "The holders of slots %(slots)s have changed since: the new ones were not disturbed.",
                len(changed),
            )
            raise CommandError(told % {"slots": ", ".join(changed)})


class Stop(Verb):
    help = gettext_noop("Asks holders to stop. Nothing is taken from them: they decide when they leave.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        arguments.add_name(parser)
        arguments.add_slot(parser)
        told = gettext("only if its holder still has this token")
        parser.add_argument("--token", metavar="TOKEN", type=int, help=told)
        arguments.add_reason(parser)

    def handle(self) -> None:
        """Ask the holders, and say whom."""
        name, slot, token = self.given.name, self.given.slot, self.given.token
        if token is not None and slot is None:
            raise CommandError(gettext("A token belongs to a slot: give --slot too."), returncode=2)
        self.known()
        who: dict[str, Any] = {"by": self.by, "using": self.given.database, "reason": self.given.reason}
        try:
            asked = control.request_stop(name, slot, token, **who)
        except BackendError:
            raise
        except SemaphoreError as error:
            raise CommandError(output.clean(str(error))) from error
        which = output.which(name, slot)
        if asked:
            told = ngettext("Asked to stop (%(count)d holder):", "Asked to stop (%(count)d holders):", len(asked))
            self.done(told % {"count": len(asked)})
            self.lines(map(output.sentence, asked), "  ")
            self.say(gettext("Nothing was taken from them: they keep their slots until they leave."))
        elif token is not None:
            told = gettext("%(token)d is not the token of %(which)s any more: the holder of now was not asked.")
            raise CommandError(told % {"token": token, "which": which})
        else:
            self.say(gettext("Nobody holds %(which)s: no holder was asked.") % {"which": which})
