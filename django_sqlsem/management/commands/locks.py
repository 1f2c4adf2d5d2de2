"""``manage.py locks``: see who holds and who waits, clean up, and run commands under a semaphore."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import itertools
import shlex
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import close_old_connections

from django_sqlsem import (
    control,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.core import identity
from django_sqlsem.core.names import ONE_SLOT
from django_sqlsem.exceptions import (
    AcquireTimeoutError,
    BackendError,
    SemaphoreError,
    kill_needed,
)
from django_sqlsem.management import arguments, output
from django_sqlsem.management.verbs import (
    doctor,
    run,
    stopping,
    waits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_sqlsem.control import PurgeResult
    from django_sqlsem.snapshots import SemaphoreSnapshot


class Command(doctor.DoctorVerb, waits.WaitsVerb, stopping.StoppingVerbs):
    """Operate the semaphores of one database."""

    help = (
        "Shows who holds and who waits for semaphores, cleans up after the dead, and runs commands under a semaphore."
    )
    requires_system_checks = ()  # it must serve at night, when something is wrong

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add the exit codes to the help."""
        kwargs = {"epilog": arguments.EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare one sub-command per verb."""
        arguments.add_arguments(parser)

    def handle(self, *, verb: str, **options: Any) -> None:
        """Do what the verb says."""
        if options["command"] and verb != "run":
            raise CommandError(f"locks {verb} takes no command: {shlex.join(options['command'])}", returncode=2)
        try:
            getattr(self, f"handle_{verb}")(**options)
        except BackendError as error:
            raise CommandError(f"{error} (Was `migrate` run on this database?)") from error
        except KeyboardInterrupt:
            self.stderr.write("Interrupted.")
            sys.exit(130)

    # Reading.

    def handle_list(
        self,
        *,
        stale: bool,
        name_glob: str | None,
        format: str,  # noqa: A002
        watch: float | None,
        database: str | None,
        **_: Any,
    ) -> None:
        """Print the list once, or again and again."""
        if watch is None:
            self._list(stale, name_glob, format, database)
            return
        with contextlib.suppress(KeyboardInterrupt):
            for turn in itertools.count():
                if format == "table":
                    self._start_screen(watch)
                try:
                    self._list(stale, name_glob, format, database, header=turn == 0, indent=None)
                except BackendError as error:  # the database may come back
                    self.stderr.write(self.style.ERROR(str(error)))
                self.stdout.flush()
                time.sleep(watch)
                close_old_connections()

    def _start_screen(self, watch: float) -> None:
        if self.stdout.isatty():
            self.stdout.write("\x1b[H\x1b[2J\x1b[3J", ending="")
        self.stdout.write(f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S}, every {watch:g} s\n")

    def _list(
        self,
        stale: bool,
        name_glob: str | None,
        form: str,
        database: str | None,
        *,
        header: bool = True,
        indent: int | None = 2,
    ) -> None:
        found = queries.semaphores(name_glob, state="stale" if stale else None, using=database)
        shown = [output.only_stale(snapshot) for snapshot in found] if stale else found
        if form == "json":
            values = queries.refreshes(name_glob, using=database)
            self._print(output.as_json(shown, values, using=database, whole=not stale, indent=indent))
        elif form == "csv":
            text = output.as_csv(shown, header=header)
            if text:
                self._print(text)
        else:
            self._print_table(shown, found, stale=stale, glob=name_glob)
            for line in [] if stale else output.refresh_table(queries.refreshes(name_glob, using=database)):
                self._print(line)
            for note in queries.notes(using=database):
                self._print(output.clean(note))

    def _print_table(
        self, shown: list[SemaphoreSnapshot], found: list[SemaphoreSnapshot], *, stale: bool, glob: str | None
    ) -> None:
        body = output.rows(shown)
        if body:
            header, *lines = output.table(body, output.headers(shown), fit=self.stdout.isatty())
            self._print(self.style.MIGRATE_HEADING(header))
            for line, row in zip(lines, body, strict=True):
                self._print(self.style.WARNING(line) if row[2].startswith("stale") else line)
            self._print("")
        busy = [each for each in found if each.holders or each.waiters or each.paused or each.tokens]
        for snapshot in busy:
            self._print(output.summary(snapshot))
        if not body:
            among = f" among names like {output.clean(glob)!r}" if glob else ""
            if stale:
                self._print(f"Nothing is stale{among}.")
            else:
                self._print(f"Nothing is held and nobody waits{among}: {output.count(len(found), 'name')} known.")

    def handle_show(self, *, name: str, format: str, database: str | None, **_: Any) -> None:  # noqa: A002
        """Print all about one name."""
        snapshot = self._known(name, database)
        values = [each for each in queries.refreshes(using=database) if each.name == snapshot.name]
        if format == "json":
            self._print(output.as_json([snapshot], values, using=database, whole=False, only=True))
            return
        self._print(self.style.MIGRATE_HEADING(output.summary(snapshot)))
        for line in output.details(snapshot):
            self._print(line)
        for line in output.refresh_table(values):
            self._print(line)

    # Acting.

    def handle_purge(
        self, *, idle: bool, older_than: float | None, name_glob: str | None, dry_run: bool, interactive: bool,
        database: str | None, **_: Any,
    ) -> None:  # fmt: skip
        """Say what would be purged, ask, and do just that."""
        plan = control.plan_purge(idle=0 if idle else None, older_than=older_than, name_glob=name_glob, using=database)
        for line in output.plan(plan):
            self._print(line)
        if not plan:
            self._print("Nothing to purge.")
        elif dry_run:
            self._print("Dry run: nothing was changed.")
        elif self._agreed(interactive):
            self._print_result(control.execute_purge(plan, by=self._by()))

    def _print_result(self, result: PurgeResult) -> None:
        self._print(self.style.SUCCESS(
            f"Freed {output.count(len(result.freed), 'slot')}, deleted {output.count(len(result.deleted), 'name')}."
        ))  # fmt: skip
        self._print_lines(f"Not touched, it has changed: {output.sentence(holder)}" for holder in result.changed)
        self._print_lines(f"Not deleted, it is in use: {output.clean(name)}" for name in result.in_use)

    def handle_revoke(
        self, *, name: str, slot: int | None, kill: bool, interactive: bool, database: str | None, **_: Any
    ) -> None:
        """Name the holders, and what goes with them; ask, and take the slots from just those."""
        snapshot = self._known(name, database)
        shown = [holder for holder in snapshot.holders if slot is None or slot in holder.numbers]
        if not shown:
            which = "" if slot is None else f"slot {slot} of "
            self._print(f"Nobody holds {which}{output.clean(name)!r}: nothing to revoke.")
            return
        self._print(f"To be revoked ({output.count(len(shown), 'slot')}):")
        self._print_lines(map(output.sentence, shown))
        for holder in shown:
            if holder.needs_kill and (not kill or holder.session_id is None):
                raise CommandError(f"{output.clean(str(kill_needed(holder)))} Nothing was changed.")
        others = queries.held_along(shown, using=database)
        if others:
            self._print(f"To be lost as well, as the same sessions hold it ({output.count(len(others), 'slot')}):")
            self._print_lines(map(output.sentence, others))
        if not self._agreed(interactive):
            return
        by = self._by()
        changed = [
            holder
            for holder in shown
            if not control.revoke(name, holder.slot, holder.token, by=by, using=database, kill=kill)
        ]
        self._print(self.style.SUCCESS(f"Revoked {output.count(len(shown) - len(changed), 'slot')}."))
        if changed:
            slots = ", ".join(holder.place for holder in changed)
            raise CommandError(f"The holder of slot {slots} has changed since: whoever holds it now was not disturbed.")

    def handle_set(self, *, name: str, slots: Any, pause: bool, resume: bool, database: str | None, **_: Any) -> None:
        """Change one semaphore."""
        by = self._by()
        try:
            if pause:
                done = control.pause(name, by=by, using=database)
            elif resume:
                done = control.resume(name, by=by, using=database)
            else:
                done = control.set_slots(name, slots, by=by, using=database)
        except ValueError as error:
            raise CommandError(str(error)) from error
        snapshot = self._known(name, database)
        if not done:
            raise CommandError(f"{output.clean(name)!r} was purged meanwhile.")
        self._print(self.style.SUCCESS(output.summary(snapshot)))
        if snapshot.held > snapshot.slots:
            self._print("No holder is interrupted; nothing is granted until fewer are held.")
        if pause:
            self._print("Nothing more is granted until `--resume`; holders are not disturbed.")

    def handle_sql(self, *, apply: bool, drop: bool, interactive: bool, database: str | None, **_: Any) -> None:
        """Print the procedures; or say what will be done to them, ask, and do it."""
        batches = control.procedures(drop=drop, using=database)
        if not batches:
            raise CommandError("Nothing to do: these are for semaphores on SQL Server's application locks.")
        if not apply and not drop:
            self._print(output.script(batches))
            return
        self._print(f"To be {'removed from' if drop else 'installed in'} the database: {output.procedures(batches)}.")
        if self._agreed(interactive):
            control.change_procedures(drop=drop, by=self._by(), using=database)
            self._print(self.style.SUCCESS("Removed." if drop else "Installed."))

    def handle_run(
        self, *, name: str, slots: int | None, timeout: Any, command: list[str], database: str | None, **options: Any
    ) -> None:
        """Run the command under a permit, and end with its exit code."""
        if not command:
            raise CommandError(
                "Which command? Write it behind --, as in: locks run nightly -- ./backup.sh", returncode=2
            )
        known = queries.semaphore(name, using=database)
        if known and known.kind in ONE_SLOT and slots in (None, 1):
            lock = mutex(name, timeout=timeout, using=database)._as(known.kind)
        else:
            lock = semaphore(name, slots, timeout=timeout, using=database)
        signals = run.Signals(options["stop_signal"])
        say: Callable[[str], None] = self.stderr.write
        with signals.installed(), identity.activity(shlex.join(command), run.system_user()):
            try:
                with lock.acquire() as permit:
                    code = run.run_command(command, permit, signals, say)
            except AcquireTimeoutError as error:
                raise CommandError(str(error), returncode=arguments.BUSY) from error
            except (SemaphoreError, ImproperlyConfigured) as error:
                raise CommandError(str(error)) from error
        if code:
            sys.exit(code)

    # Talking.

    def _known(self, name: str, database: str | None) -> SemaphoreSnapshot:
        snapshot = queries.semaphore(name, using=database)
        if snapshot is None:
            near = difflib.get_close_matches(name, [each.name for each in queries.semaphores(using=database)], n=3)
            hint = f" Is it {' or '.join(repr(output.clean(each)) for each in near)}?" if near else ""
            raise CommandError(f"There is no semaphore {output.clean(name)!r}.{hint}")
        return snapshot

    def _agreed(self, interactive: bool) -> bool:
        if not interactive:
            return True
        if not sys.stdin or not sys.stdin.isatty():
            raise CommandError("There is no terminal to ask: give --noinput to do this. Nothing was changed.")
        self.stdout.write("Continue? [y/N] ", ending="")
        self.stdout.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return True
        self._print("Nothing was changed.")
        return False

    def _by(self) -> str:
        return f"{run.system_user()}@{socket.gethostname()}"

    def _print(self, text: str) -> None:
        self.stdout.write(output.encodable(text, getattr(self.stdout, "encoding", None) or "utf-8"))

    def _print_lines(self, lines: Any) -> None:
        for line in lines:
            self._print(f"  {line}")
