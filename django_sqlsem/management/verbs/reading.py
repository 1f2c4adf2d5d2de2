"""What operators look at: all locks, all about one, and who waits while holding something else."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from django.core.management.base import CommandParser
from django.db import close_old_connections
from django.utils.translation import gettext, gettext_noop, pgettext, pgettext_lazy

from django_sqlsem import queries, serialize
from django_sqlsem.core.durations import parse_duration
from django_sqlsem.core.modes import UPDATE, UPGRADE, WHOLE
from django_sqlsem.exceptions import BackendError
from django_sqlsem.management import arguments, output
from django_sqlsem.management.verbs import Verb
from django_sqlsem.snapshots import SemaphoreSnapshot, TemplateSnapshot, WaitSnapshot


@arguments.checked
def _interval(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 0.1:
        raise ValueError(gettext("watch at most ten times a second: 0.1 or more."))
    return seconds


class List(Verb):
    help = gettext_noop("Lists holders, waiters and idle names; the names that one template has made are one line.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        which = parser.add_mutually_exclusive_group()
        which.add_argument("--stale", action="store_true", help=gettext("only slots whose holder seems gone"))
        told = gettext("only names that are held, waited for or paused")
        which.add_argument("--busy", action="store_true", help=told)
        arguments.add_glob(parser)
        told = gettext("only the names that this template has made, one by one: 'sync:{request.user.pk}'")
        parser.add_argument("--template", help=told)
        arguments.add_format(parser, "table", "json", "csv")
        told = gettext("repeat, every 2 s by default")
        parser.add_argument("--watch", metavar="SECONDS", nargs="?", const=2.0, type=_interval, help=told)

    def handle(self) -> None:
        """Print the list once, or again and again."""
        every = self.given.watch
        if every is None:
            self._print()
            return
        with contextlib.suppress(KeyboardInterrupt):
            for turn in itertools.count():
                if self.given.format == "table":
                    if self.stdout.isatty():
                        self.stdout.write("\x1b[H\x1b[2J\x1b[3J", ending="")
                    now = f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
                    self.say(gettext("%(now)s, every %(seconds)g s") % {"now": now, "seconds": every})
                try:
                    self._print(again=turn > 0)
                except BackendError as error:  # the database may come back
                    self.stderr.write(self.style.ERROR(str(error)))
                self.stdout.flush()
                time.sleep(every)
                close_old_connections()

    def _print(self, *, again: bool = False) -> None:
        given, using = self.given, self.given.database
        grouped = not (given.stale or given.busy or given.name_glob or given.template) and given.format != "csv"
        state: queries.State | None = "stale" if given.stale else "busy" if given.busy else None
        template = "" if grouped else given.template
        found = queries.semaphores(given.name_glob, state=state, template=template, using=using)
        groups = queries.templates(using=using) if grouped else []
        shown = [output.only_stale(snapshot) for snapshot in found] if given.stale else found
        if given.format == "json":
            self._print_json(shown, groups)
        elif given.format == "csv":
            if text := output.as_csv(shown, header=not again):
                self.say(text)
        else:
            if groups:
                self._print_groups(groups)
            if shown or not groups:
                self._print_table(shown, found)
                if not any(each.holders or each.waiters for each in shown):
                    self.lines(filter(None, [self._nothing(found, groups)]))
            if not given.stale and not given.template:
                self.lines(output.refresh_table(queries.refreshes(given.name_glob, using=using)))
            self.lines(map(output.clean, queries.notes(using=using)))

    def _print_json(self, shown: list[SemaphoreSnapshot], groups: list[TemplateSnapshot]) -> None:
        given, using = self.given, self.given.database
        values = queries.refreshes(given.name_glob, using=using)
        if not (given.stale or given.busy or given.template):
            # A value of which nothing is known as a semaphore: that was purged.
            absent = {each.name for each in values} - {each.name for each in shown}
            if groups:
                absent -= queries.by_name(absent, using=using).keys()
            purged = [SemaphoreSnapshot(name, "refresh", 1, 1, None, False) for name in absent]
            shown = sorted([*shown, *purged], key=lambda snapshot: snapshot.name)
        found = [*map(dataclasses.asdict, groups), *output.as_plain(shown, values, using)]
        self.say(serialize.as_json(found, indent=2 if given.watch is None else None))

    def _print_groups(self, groups: list[TemplateSnapshot]) -> None:
        header, *lines = output.tabular(output.TEMPLATES, groups)
        self.heading(header)
        for line, group in zip(lines, groups, strict=True):
            self.say(self.style.WARNING(line) if group.trouble else line)
        self.say("")
        self.lines(output.paused_names(groups, self.given.database))

    def _print_table(self, shown: list[SemaphoreSnapshot], found: list[SemaphoreSnapshot]) -> None:
        rows = output.rows(shown)
        if not self.given.stale:
            rows += output.idle_rows(shown)
        if rows:
            cells = [row.cells for row in rows]
            header, *lines = output.table(cells, output.headers(shown), fit=self.stdout.isatty())
            self.heading(header)
            for line, row in zip(lines, rows, strict=True):
                warned = self.style.WARNING(line) if row.warns else line
                self.say(self._dim(line) if row.idle and warned is line else warned)
            self.say("")
        self.lines(output.summary(each) for each in found if each.busy or each.units or each.slots_until is not None)

    def _dim(self, text: str) -> str:
        """Return a line that matters less; the same where there are no colours."""
        return text if self.style.WARNING(text) == text else f"\x1b[2m{text}\x1b[0m"

    def _nothing(self, found: list[SemaphoreSnapshot], groups: list[TemplateSnapshot]) -> str:
        """Return what there is not, and among which names; nothing if that would be wrong."""
        parts = []
        if self.given.template:
            template = repr(output.clean(self.given.template))
            parts.append(gettext("among the names of %(template)s") % {"template": template})
        if self.given.name_glob:
            parts.append(gettext("among names like %(glob)s") % {"glob": repr(output.clean(self.given.name_glob))})
        among = " ".join(parts)
        if self.given.stale:
            told = gettext("Nothing is stale %(among)s.") if among else gettext("Nothing is stale.")
        elif self.given.busy:
            told = gettext("Nothing is busy %(among)s.") if among else gettext("Nothing is busy.")
            told = "" if found else told
        elif any(each.held or each.stale or each.waiting for each in groups):
            told = ""
        elif among:
            told = gettext("Nothing is held and nobody waits %(among)s: %(names)s known.")
        else:
            told = gettext("Nothing is held and nobody waits: %(names)s known.")
        return told % {"among": among, "names": output.count_known(len(found), [each.names for each in groups])}


class Show(Verb):
    help = gettext_noop("Shows all about one semaphore.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        arguments.add_name(parser)
        arguments.add_format(parser, "table", "json")

    def handle(self) -> None:
        """Print all about one name."""
        snapshot, using = self.known(), self.given.database
        values = [each for each in queries.refreshes(using=using) if each.name == snapshot.name]
        if self.given.format == "json":
            self.say(serialize.as_json(output.as_plain([snapshot], values, using)[0]))
        else:
            self.heading(output.summary(snapshot))
            self.lines([*output.details(snapshot), *output.refresh_table(values)])


#: What JSON tells of a holder.
HOLDER_FIELDS: Final = (
    "name", "slot", "slots", "mode", "token", "host", "pid", "thread", "label", "user", "acquired_at", "age",
)  # fmt: skip
_AS: Final = {
    WHOLE: pgettext_lazy("waits for", "all of it"),
    UPDATE: pgettext_lazy("waits for", "upgradable"),
    UPGRADE: pgettext_lazy("waits for", "upgrade"),
}
_WAITS: Final[output.Columns] = (
    (pgettext_lazy("column", "WAITS FOR"), lambda wait: wait.name),
    (pgettext_lazy("column", "AS"), lambda wait: _what(wait)),
    (pgettext_lazy("column", "SINCE"), lambda wait: output.ago(wait.age)),
    (pgettext_lazy("column", "PROCESS"), output.who),
    (pgettext_lazy("column", "WORK"), lambda wait: wait.label),
    (pgettext_lazy("column", "USER"), lambda wait: wait.user),
    (pgettext_lazy("column", "HOLDS"), lambda wait: wait.holds_text),
    (pgettext_lazy("column", "HELD BY"), lambda wait: wait.held_by_text),
)


class Waits(Verb):
    help = gettext_noop(
        "Shows waits of those that hold something else, and deadlocks; ends with 1 if there is a deadlock."
    )

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        arguments.add_format(parser, "table", "json")

    def handle(self) -> None:
        """Print the waits and the deadlocks; end with 1 if there is one."""
        using = self.given.database
        found, deadlocks = queries.waits(using=using), queries.deadlocks(using=using)
        if self.given.format == "json":
            told = [{"text": str(each), "names": each.names, "waits": _plain(each.waits)} for each in deadlocks]
            self.say(serialize.as_json({"waits": _plain(found), "deadlocks": told}))
        else:
            if found:
                self.lines(output.tabular(_WAITS, found))
            else:
                self.say(gettext("Nobody waits while holding something else."))
            for deadlock in deadlocks:
                sentence = gettext("Deadlock: %(waits)s.") % {"waits": deadlock}
                self.say(self.style.ERROR(output.clean(sentence)))
        if deadlocks:
            sys.exit(1)


def _what(wait: WaitSnapshot) -> str:
    if wait.mode in _AS:
        return str(_AS[wait.mode])
    return pgettext("waits for", "slot") if wait.take == 1 else output.count_slots(wait.take)


def _plain(waits: Sequence[WaitSnapshot]) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(wait)
        | {
            side: [{field: getattr(holder, field) for field in HOLDER_FIELDS} for holder in getattr(wait, side)]
            for side in ("holds", "held_by")
        }
        for wait in waits
    ]
