"""What the verbs talk with: the command's streams and colours, its questions, and the names that it knows."""

from __future__ import annotations

import difflib
import getpass
import os
import socket
import sys
from collections.abc import Iterable

from django.core.management.base import BaseCommand, CommandError
from django.utils.translation import gettext, ngettext

from django_sqlsem import queries
from django_sqlsem.core.text import shell_quoted
from django_sqlsem.management.output import clean
from django_sqlsem.snapshots import SemaphoreSnapshot


def system_user() -> str:
    """Return the name of the user that runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return f"uid {os.getuid()}"


class Console:
    """The terminal, or the pipe, that a command was started from."""

    def __init__(self, command: BaseCommand) -> None:
        self.style, self.stdout, self.stderr = command.style, command.stdout, command.stderr

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads."""
        return self.stdout.isatty()

    @property
    def by(self) -> str:
        """Who acts, as holders and the log are told."""
        return f"{system_user()}@{socket.gethostname()}"

    def say(self, text: str) -> None:
        """Print a line; a terminal that can't show a name still shows the rest."""
        encoding = getattr(self.stdout, "encoding", None) or "utf-8"
        self.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def heading(self, text: str) -> None:
        """Print what stands above the rest."""
        self.say(self.style.MIGRATE_HEADING(text))

    def done(self, text: str) -> None:
        """Print what was achieved."""
        self.say(self.style.SUCCESS(text))

    def dim(self, text: str) -> str:
        """Return a line that matters less; the same where there are no colours."""
        return text if self.style.WARNING(text) == text else f"\x1b[2m{text}\x1b[0m"

    def lines(self, lines: Iterable[str], indent: str = "") -> None:
        """Print several lines."""
        for line in lines:
            self.say(f"{indent}{line}")

    def agreed(self, interactive: bool) -> bool:
        """Ask whether to go on. Raises ``CommandError`` without a terminal."""
        if not interactive:
            return True
        if not sys.stdin or not sys.stdin.isatty():
            raise CommandError(gettext("There is no terminal to ask: give --noinput to do this. Nothing was changed."))
        self.stdout.write(gettext("Continue? [y/N]") + " ", ending="")
        self.stdout.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes", *gettext("y, yes").split(", ")):
            return True
        self.say(gettext("Nothing was changed."))
        return False

    @staticmethod
    def known(name: str, database: str | None) -> SemaphoreSnapshot:
        """Return the snapshot of a name. Raises ``CommandError`` that says which names are like it."""
        if snapshot := queries.semaphore(name, using=database):
            return snapshot
        if made := next((each.names for each in queries.templates(using=database) if each.template == name), 0):
            told = ngettext(
                "%(template)s is a template of %(count)d name: see `locks list --template %(quoted)s`. Actions are for"
                " names.",
                "%(template)s is a template of %(count)d names: see `locks list --template %(quoted)s`. Actions are for"
                " names.",
                made,
            )
            quoted = shell_quoted(clean(name))
            raise CommandError(told % {"template": repr(clean(name)), "count": made, "quoted": quoted})
        near = difflib.get_close_matches(name, [each.name for each in queries.semaphores(using=database)], n=3)
        told = gettext("There is no semaphore %(name)s.") % {"name": repr(clean(name))}
        if near:
            alike = gettext(" or ").join(repr(clean(each)) for each in near)
            told += " " + gettext("Is it %(names)s?") % {"names": alike}
        told += " " + gettext("A name is known from its first acquire.")
        raise CommandError(told)
