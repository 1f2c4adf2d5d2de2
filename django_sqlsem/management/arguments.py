"""What the arguments of ``manage.py locks`` mean, those that several verbs take, and the exit codes of its help."""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from django.core.management.base import CommandParser
from django.db import connections
from django.utils.translation import gettext

from django_sqlsem.core import names
from django_sqlsem.core.durations import parse_duration
from django_sqlsem.core.modes import WRITER

#: EX_TEMPFAIL of sysexits.h: try again later.
EXIT_BUSY: Final = 75


def epilog() -> str:
    return gettext("""\
exit codes:
  0    done; also when there was nothing to do
  1    error: no such name, the database failed, a holder changed before it could be revoked,
       (doctor) something is wrong, (waits) there is a deadlock,
       or (run) the permit was lost although the command ended with 0
  2    wrong arguments
  75   run: no slot became free within the timeout; drain: a holder had not left within --wait
  126  run: the command can't be executed; 127: it was not found
  141  nobody read what was printed
  else run: the command's own exit code, 128+n if signal n ended it
""")


class LocksParser(CommandParser):
    """Takes everything behind the first ``--`` as the command to run, whatever it looks like."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Set the command aside and parse the rest."""
        args = list(sys.argv[1:] if args is None else args)
        command: list[str] = []
        if "--" in args:
            at = args.index("--")
            args, command = args[:at], args[at + 1 :]
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:  # else the whole command's parser says so, with its own usage
            self.error(gettext("unrecognized arguments: %(text)s") % {"text": " ".join(rest)})
        namespace.command = command
        return namespace, rest


def checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let a validator's own message reach the user."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


@checked
def slots(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(
            gettext("slots must be an int from 1 to %(most)d, not %(text)s.")
            % {"most": names.MAX_SLOTS, "text": repr(text)}
        )
    return names.validate_slots(int(text))


@checked
def timeout(text: str) -> float | None:
    """Read how long to wait; ``none``: for ever."""
    return None if text == "none" else parse_duration(text)


age: Final = checked(parse_duration)


@checked
def _database(text: str) -> str:
    if text not in connections.settings:
        raise ValueError(
            gettext("%(text)s is not in DATABASES: %(aliases)s.")
            % {"text": repr(text), "aliases": ", ".join(sorted(connections.settings))}
        )
    return text


def add_usual(parser: CommandParser, usual: Iterable[argparse.Action]) -> None:
    """Take Django's options, such as ``--settings``, behind the verb too; its help need not tell of them again."""
    for action in usual:
        again = copy.copy(action)
        again.default = again.help = argparse.SUPPRESS  # else it would hide what was given before the verb
        parser._add_action(again)


def add_duration(parser: CommandParser) -> None:
    told = gettext("over by itself after so long: 90s, 30m, 2h; default: when you say so")
    parser.add_argument("--for", dest="duration", metavar="AGE", type=age, help=told)


def add_reason(parser: CommandParser) -> None:
    told = gettext("why: it is kept with what you did, and shown")
    parser.add_argument("--reason", metavar="TEXT", default="", help=told)


def add_database(parser: CommandParser, option: str, told: str) -> None:
    parser.add_argument(option, dest="database", metavar="ALIAS", type=_database, help=told)


def add_name(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME", type=checked(names.validate_name), help=gettext("the semaphore's name"))


def add_glob(parser: CommandParser) -> None:
    parser.add_argument("--name", dest="name_glob", metavar="GLOB", help=gettext("only names like this: 'reports:*'"))


def add_slot(parser: CommandParser) -> None:
    """Add the number of one slot; 0 is the writer's place."""

    def slot(text: str) -> Any:
        return WRITER if text == str(WRITER) else slots(text)

    parser.add_argument("--slot", metavar="N", type=slot, help=gettext("only this slot; default: all of them"))


def add_format(parser: CommandParser, *formats: str) -> None:
    """Add the formats, the default one first."""
    parser.add_argument("--format", choices=formats, default=formats[0])


def add_noinput(parser: CommandParser) -> None:
    told = gettext("do not ask; needed without a terminal")
    parser.add_argument("--noinput", "--no-input", action="store_false", dest="interactive", help=told)
