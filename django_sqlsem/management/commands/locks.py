"""``manage.py locks``: see who holds and who waits, clean up, and run commands under a semaphore."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_sqlsem.exceptions import BackendError
from django_sqlsem.management import arguments, verbs
from django_sqlsem.management.console import Console


class Command(BaseCommand):
    """Operate the semaphores of one database."""

    help = (
        "Shows who holds and who waits for semaphores, cleans up after the dead, and runs commands under a semaphore."
    )
    requires_system_checks = ()  # it must serve at night, when something is wrong
    #: The verb that the command line begins with: no other is loaded.
    _called: str | None = None

    def run_from_argv(self, argv: list[str]) -> None:
        """Look which verb is called."""
        self._called = next((verb for verb in verbs.VERBS if argv[2:3] == [verb]), None)
        super().run_from_argv(argv)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Add the exit codes to the help."""
        kwargs = {"epilog": arguments.EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare one sub-command per verb."""
        parsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=arguments.LocksParser)
        shared: dict[str, Any] = {"epilog": arguments.EPILOG, "formatter_class": parser.formatter_class}
        for name in verbs.VERBS:
            if self._called not in (None, name):
                parsers.add_parser(name)
                continue
            verb = verbs.load(name)
            sub = parsers.add_parser(name, help=verb.__doc__, description=verb.__doc__, **shared)
            arguments.add_database(sub)
            verb.add_arguments(sub)

    def handle(self, *, verb: str, **options: Any) -> None:
        """Do what the verb says."""
        if options["command"] and verb != "run":
            raise CommandError(f"locks {verb} takes no command: {shlex.join(options['command'])}", returncode=2)
        try:
            verbs.load(verb).handle(Console(self), **options)
        except BackendError as error:
            raise CommandError(f"{error} (Was `migrate` run on this database?)") from error
        except KeyboardInterrupt:
            self.stderr.write("Interrupted.")
            sys.exit(130)
