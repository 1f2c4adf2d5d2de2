"""The verbs of ``manage.py locks``: a class each, and a module for those of one kind, loaded when called."""

from __future__ import annotations

import argparse
import difflib
import getpass
import importlib
import os
import socket
import sys
from collections.abc import Iterable
from typing import ClassVar, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils.translation import gettext, ngettext

from django_sqlsem import queries
from django_sqlsem.core.text import shell_quoted
from django_sqlsem.management.output import clean
from django_sqlsem.snapshots import SemaphoreSnapshot

#: The verbs in the order of the help, with their modules; their classes have their names.
VERBS: Final = {
    "list": "reading",
    "show": "reading",
    "waits": "reading",
    "purge": "permits",
    "revoke": "permits",
    "stop": "permits",
    "drain": "names",
    "set": "names",
    "doctor": "setup",
    "sql": "setup",
    "run": "run",
}
#: What ``manage.py locks`` alone does.
ALONE: Final = "list"


def load(verb: str) -> type[Verb]:
    """Import the module of a verb, and return its class."""
    found: type[Verb] = getattr(importlib.import_module(f"{__name__}.{VERBS[verb]}"), verb.title())
    return found


def system_user() -> str:
    """Return the name of the user that runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return f"uid {os.getuid()}"


class Verb:
    """One call of a verb: the arguments that were given, and the terminal, or the pipe, that it was called from.

    ``add_arguments()`` declares what the verb takes, and ``handle()`` does it.
    """

    #: What the help says of it.
    help: ClassVar[str]

    def __init__(self, command: BaseCommand, given: argparse.Namespace) -> None:
        self.given = given
        self.style, self.stdout, self.stderr = command.style, command.stdout, command.stderr

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        """Declare what it takes besides the database."""
        raise NotImplementedError

    def handle(self) -> None:
        """Do it."""
        raise NotImplementedError

    @property
    def by(self) -> str:
        """Who acts, as holders and the log are told."""
        return f"{system_user()}@{socket.gethostname()}"

    def say(self, text: str) -> None:
        """Print a line; a terminal that can't show a name still shows the rest."""
        encoding = getattr(self.stdout, "encoding", None) or "utf-8"
        self.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def heading(self, text: str) -> None:
        self.say(self.style.MIGRATE_HEADING(text))

    def done(self, text: str) -> None:
        self.say(self.style.SUCCESS(text))

    def lines(self, lines: Iterable[str], indent: str = "") -> None:
        for line in lines:
            self.say(f"{indent}{line}")

    def agreed(self) -> bool:
        """Ask whether to go on, unless it was said beforehand. Raises ``CommandError`` without a terminal."""
        if not self.given.interactive:
            return True
        if not sys.stdin or not sys.stdin.isatty():
            raise CommandError(gettext("There is no terminal to ask: give --noinput to do this. Nothing was changed."))
        self.stdout.write(gettext("Continue? [y/N]") + " ", ending="")
        self.stdout.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes", *gettext("y, yes").split(", ")):
            return True
        self.say(gettext("Nothing was changed."))
        return False

    def known(self) -> SemaphoreSnapshot:
        """Return the snapshot of the given name. Raises ``CommandError`` that says which names are like it."""
        name, database = self.given.name, self.given.database
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
