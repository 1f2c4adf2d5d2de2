"""Lists who holds and who waits, and the names that are idle; those that one template has made as one line."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from typing import Any

from django.core.management.base import CommandParser
from django.db import close_old_connections
from django.utils.translation import gettext

from django_sqlsem import queries
from django_sqlsem.core.durations import parse_duration
from django_sqlsem.exceptions import BackendError
from django_sqlsem.management import arguments, output
from django_sqlsem.management.console import Console
from django_sqlsem.snapshots import SemaphoreSnapshot, TemplateSnapshot


@arguments.checked
def _interval(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 0.1:
        raise ValueError(gettext("watch at most ten times a second: 0.1 or more."))
    return seconds


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


def handle(console: Console, *, format: str, watch: float | None, **options: Any) -> None:  # noqa: A002
    """Print the list once, or again and again."""
    if watch is None:
        _print(console, format, **options)
        return
    with contextlib.suppress(KeyboardInterrupt):
        for turn in itertools.count():
            if format == "table":
                if console.is_terminal:
                    console.stdout.write("\x1b[H\x1b[2J\x1b[3J", ending="")
                now = f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
                console.say(gettext("%(now)s, every %(seconds)g s") % {"now": now, "seconds": watch})
            try:
                _print(console, format, **options, header=turn == 0, indent=None)
            except BackendError as error:  # the database may come back
                console.stderr.write(console.style.ERROR(str(error)))
            console.stdout.flush()
            time.sleep(watch)
            close_old_connections()


def _print(
    console: Console,
    form: str,
    *,
    stale: bool,
    busy: bool,
    name_glob: str | None,
    template: str | None,
    database: str | None,
    header: bool = True,
    indent: int | None = 2,
    **_: Any,
) -> None:
    grouped = not (stale or busy or name_glob or template) and form != "csv"
    wanted = "" if grouped else template
    found = queries.semaphores(name_glob, state="stale" if stale else None, template=wanted, using=database)
    groups = queries.templates(using=database) if grouped else []
    if busy:
        found = [each for each in found if _is_busy(each)]
    shown = [output.only_stale(snapshot) for snapshot in found] if stale else found
    if form == "json":
        values = queries.refreshes(name_glob, using=database)
        whole = not (stale or busy or template)
        console.say(output.as_json(shown, values, groups, using=database, whole=whole, indent=indent))
    elif form == "csv":
        if text := output.as_csv(shown, header=header):
            console.say(text)
    else:
        _print_groups(console, groups, database)
        if shown or not groups:
            _print_table(console, shown, found, stale=stale)
            if not any(each.holders or each.waiters for each in shown):
                nothing = _nothing(found, groups, stale=stale, busy=busy, among=_among(template, name_glob))
                console.lines(filter(None, [nothing]))
        if not stale and not template:
            console.lines(output.refresh_table(queries.refreshes(name_glob, using=database)))
        console.lines(map(output.clean, queries.notes(using=database)))


def _print_groups(console: Console, groups: list[TemplateSnapshot], database: str | None) -> None:
    header, *lines = output.template_table(groups)
    if groups:
        console.heading(header)
        for line, group in zip(lines, groups, strict=True):
            console.say(console.style.WARNING(line) if group.trouble else line)
        console.say("")
        console.lines(output.paused_names(groups, database))


def _print_table(
    console: Console, shown: list[SemaphoreSnapshot], found: list[SemaphoreSnapshot], *, stale: bool
) -> None:
    body = output.rows(shown)
    idle = [] if stale else output.idle_rows(shown)
    if body or idle:
        cells = [row.cells for row in (*body, *idle)]
        header, *lines = output.table(cells, output.headers(shown), fit=console.is_terminal)
        console.heading(header)
        for nth, (line, row) in enumerate(zip(lines, [*body, *idle], strict=True)):
            warned = console.style.WARNING(line) if row.warns else line
            console.say(console.dim(line) if nth >= len(body) and warned is line else warned)
        console.say("")
    console.lines(output.summary(each) for each in found if _is_busy(each) or each.slots_until is not None)


def _among(template: str | None, name_glob: str | None) -> str:
    """Return among which names was looked; nothing: among all."""
    parts = []
    if template:
        parts.append(gettext("among the names of %(template)s") % {"template": repr(output.clean(template))})
    if name_glob:
        parts.append(gettext("among names like %(glob)s") % {"glob": repr(output.clean(name_glob))})
    return " ".join(parts)


def _nothing(
    found: list[SemaphoreSnapshot], groups: list[TemplateSnapshot], *, stale: bool, busy: bool, among: str
) -> str:
    """Return what there is not; nothing if that would be wrong."""
    if stale:
        told = gettext("Nothing is stale %(among)s.") if among else gettext("Nothing is stale.")
    elif busy:
        told = gettext("Nothing is busy %(among)s.") if among else gettext("Nothing is busy.")
        told = "" if found else told
    elif any(each.held or each.stale or each.waiting for each in groups):
        told = ""
    elif among:
        told = gettext("Nothing is held and nobody waits %(among)s: %(names)s known.")
    else:
        told = gettext("Nothing is held and nobody waits: %(names)s known.")
    return told % {"among": among, "names": output.count_known(len(found), [each.names for each in groups])}


def _is_busy(snapshot: SemaphoreSnapshot) -> bool:
    return bool(snapshot.holders or snapshot.waiters or snapshot.paused or snapshot.units)
