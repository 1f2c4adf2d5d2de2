"""``manage.py locks``: see who holds and who waits, clean up, and run commands under a semaphore."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils.translation import gettext, gettext_lazy

from django_sqlsem.exceptions import BackendError
from django_sqlsem.management import arguments, verbs

#: Those who print what has no reader end as a signal would end them: 128 and SIGPIPE.
EXIT_PIPE: Final = 141
#: Options that are the whole command's own.
_FOR_ALL: Final = ("-h", "--help", "help", "--version", "version")


class Command(BaseCommand):
    help = gettext_lazy(  # type: ignore[assignment]  # Django takes texts that are looked up later, its stubs do not
        "Shows who holds and who waits for semaphores, cleans up after the dead, and runs commands under a semaphore."
    )
    requires_system_checks = ()  # it must serve at night, when something is wrong
    #: The verb that the command line begins with: no other is loaded.
    _called: str | None = None

    def run_from_argv(self, argv: list[str]) -> None:
        """Look which verb is called: without one, the first. End quietly if nobody reads on."""
        begins = argv[2:3]
        if not begins or (begins[0].startswith("-") and not {*verbs.VERBS, *_FOR_ALL} & set(argv)):
            argv = [*argv[:2], verbs.ALONE, *argv[2:]]
        self._called = next((verb for verb in verbs.VERBS if argv[2:3] == [verb]), None)
        try:
            try:
                super().run_from_argv(argv)
            finally:
                self.stdout.flush()
        except BrokenPipeError:  # as of `locks list | head`: what is left has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_PIPE)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        kwargs = {"epilog": arguments.epilog(), "formatter_class": argparse.RawDescriptionHelpFormatter} | kwargs
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare one sub-command per verb."""
        usual = [action for action in parser._actions if action.option_strings and action.dest not in _FOR_ALL]
        parsers = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=arguments.LocksParser)
        shared: dict[str, Any] = {"epilog": arguments.epilog(), "formatter_class": parser.formatter_class}
        shared["allow_abbrev"] = False  # --slot is one slot, --slots their number
        for name in verbs.VERBS:
            if self._called not in (None, name):
                parsers.add_parser(name)
                continue
            verb = verbs.load(name)
            told = gettext(verb.help)
            sub = parsers.add_parser(name, help=told, description=told, **shared)
            arguments.add_database(sub, "--database", gettext("where the locks are; default: as configured"))
            verb.add_arguments(sub)
            arguments.add_usual(sub, usual)

    def handle(self, *, verb: str | None, **options: Any) -> None:
        if verb is None:  # from ``call_command("locks")``
            verb = verbs.ALONE
            options |= vars(self.create_parser("manage.py", "locks").parse_args([verb]))
            del options["verb"]
        if options["command"] and verb != "run":
            told = {"verb": verb, "command": shlex.join(options["command"])}
            raise CommandError(gettext("locks %(verb)s takes no command: %(command)s") % told, returncode=2)
        try:
            verbs.load(verb)(self, argparse.Namespace(**options)).handle()
        except (BackendError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            self.stderr.write(gettext("Interrupted."))
            sys.exit(130)
