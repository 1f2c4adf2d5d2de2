"""The arguments of ``manage.py locks``, and the exit codes that its help documents."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from django.core.management.base import CommandParser
from django.db import connections

from django_sqlsem.core import names
from django_sqlsem.core.durations import UNSET, parse_duration
from django_sqlsem.core.modes import WRITER
from django_sqlsem.management.verbs import doctor

if TYPE_CHECKING:
    from collections.abc import Callable


#: EX_TEMPFAIL of sysexits.h: try again later.
BUSY: Final = 75

EPILOG: Final = """\
exit codes:
  0    done; also when there was nothing to do
  1    error: no such name, the database failed, a holder changed before it could be revoked,
       (doctor) something is wrong, (waits) there is a deadlock,
       or (run) the permit was lost although the command ended with 0
  2    wrong arguments
  75   run: no slot became free within the timeout; drain: somebody had not left within --wait
  126  run: the command can't be executed; 127: it was not found
  else run: the command's own exit code, 128+n if signal n ended it
"""


def _type(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let a validator's own message reach the user."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _slots(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"slots must be an int from 1 to {names.MAX_SLOTS}, not {text!r}.")
    return names.validate_slots(int(text))


def _slot(text: str) -> int:
    return WRITER if text == str(WRITER) else _slots(text)


def _slots_or_default(text: str) -> int | None:
    return None if text == "default" else _slots(text)


def _timeout(text: str) -> float | None:
    return None if text == "none" else parse_duration(text)


def _stop_signal(text: str) -> int | None:
    if text == "none":
        return None
    found = getattr(signal, f"SIG{text.upper().removeprefix('SIG')}", None)
    if not isinstance(found, signal.Signals):
        raise ValueError(f"{text!r} is no signal: write TERM, INT, USR1, or none.")
    return int(found)


def _interval(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 0.1:
        raise ValueError("watch at most ten times a second: 0.1 or more.")
    return seconds


def _database(text: str) -> str:
    if text not in connections.settings:
        raise ValueError(f"{text!r} is not in DATABASES: {', '.join(sorted(connections.settings))}.")
    return text


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
        namespace.command = command
        return namespace, rest


def add_arguments(parser: CommandParser) -> None:
    """Declare one sub-command per verb."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=LocksParser)
    name: dict[str, Any] = {"metavar": "NAME", "type": _type(names.validate_name), "help": "the semaphore's name"}
    glob: dict[str, Any] = {"dest": "name_glob", "metavar": "GLOB", "help": "only names like this: 'reports:*'"}
    age = _type(parse_duration)

    def add(verb: str, help_text: str, **kwargs: Any) -> CommandParser:
        sub: CommandParser = verbs.add_parser(
            verb, help=help_text, description=help_text, epilog=EPILOG, formatter_class=parser.formatter_class, **kwargs
        )
        sub.add_argument(
            "--database", metavar="ALIAS", type=_type(_database), help="where the locks are; default: as configured"
        )
        return sub

    sub = add("list", "Lists who holds and who waits.")
    sub.add_argument("--stale", action="store_true", help="only slots whose holder seems gone")
    sub.add_argument("--name", **glob)
    sub.add_argument("--format", choices=["table", "json", "csv"], default="table")
    sub.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const=2.0, type=_type(_interval), help="repeat, every 2 s by default"
    )
    sub = add("show", "Shows all about one semaphore.")
    sub.add_argument("name", **name)
    sub.add_argument("--format", choices=["table", "json"], default="table")

    sub = add("waits", "Shows who waits for what while holding what, and the deadlocks; ends with 1 if there is one.")
    sub.add_argument("--format", choices=["table", "json"], default="table")

    sub = add("purge", "Frees slots whose lease has run out, or whose session has ended. Never touches a live holder.")
    sub.add_argument("--idle", action="store_true", help="also delete names that nobody holds or waits for")
    sub.add_argument(
        "--older-than",
        metavar="AGE",
        type=age,
        help="only leases that ran out, and names last granted, so long ago: 2h",
    )
    sub.add_argument("--name", **glob)
    sub.add_argument("--dry-run", action="store_true", help="only say what would be done")
    _add_noinput(sub)

    sub = add("revoke", "Takes slots away from their holders, live ones too. They learn that their permit is lost.")
    sub.add_argument("name", **name)
    sub.add_argument("--slot", metavar="N", type=_type(_slot), help="only this slot; default: all of them")
    sub.add_argument("--kill", action="store_true", help="SQL Server: end the holders' sessions, with all they hold")
    _add_noinput(sub)

    sub = add("stop", "Asks holders to stop. Nothing is taken from them: they leave when they heed it.")
    sub.add_argument("name", **name)
    sub.add_argument("--slot", metavar="N", type=_type(_slot), help="only this slot; default: all of them")
    sub.add_argument("--token", metavar="TOKEN", type=int, help="only if its holder still has this token")

    sub = add("drain", "Grants nothing more until it is resumed, and asks all holders to stop.")
    sub.add_argument("name", **name)
    sub.add_argument(
        "--wait",
        metavar="AGE",
        type=_type(_timeout),
        default=UNSET,
        help="wait so long for the holders to leave: 90s, 15m, none (for ever); default: not at all",
    )

    sub = add("set", "Sets the number of slots, or stops and resumes granting.")
    sub.add_argument("name", **name)
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--slots",
        metavar="N",
        type=_type(_slots_or_default),
        default=UNSET,
        help="a number, or 'default': as in the code",
    )
    what.add_argument("--pause", action="store_true", help="grant nothing more; holders are not disturbed")
    what.add_argument("--resume", action="store_true", help="grant again")

    sub = add("doctor", "Examines the settings and each database that keeps locks, and says what it finds.")
    sub.add_argument("--using", dest="database", metavar="ALIAS", type=_type(_database), help="the same as --database")
    doctor.add_arguments(sub)

    sub = add("sql", "SQL Server: prints the stored procedures with which programs without Django join semaphores.")
    what = sub.add_mutually_exclusive_group()
    what.add_argument("--apply", action="store_true", help="install them")
    what.add_argument("--drop", action="store_true", help="remove them")
    _add_noinput(sub)

    sub = add(
        "run",
        "Runs a command under a semaphore. It gets SIGTERM, SIGINT and SIGHUP, and is stopped if the permit is lost.",
        usage="%(prog)s NAME [--slots N] [--timeout AGE] [--stop-signal SIGNAL] [--database ALIAS] -- COMMAND...",
    )
    sub.add_argument("name", **name)
    sub.add_argument("--slots", metavar="N", type=_type(_slots), help="how many may run; default: as declared, else 1")
    sub.add_argument(
        "--timeout",
        metavar="AGE",
        type=_type(_timeout),
        default=UNSET,
        help="how long to wait: 0, 90s, none; default: as configured",
    )
    sub.add_argument(
        "--stop-signal",
        metavar="SIGNAL",
        type=_type(_stop_signal),
        default=signal.SIGTERM,
        help="what the command gets when an operator asks to stop: INT, USR1, none; default: TERM",
    )


def _add_noinput(parser: CommandParser) -> None:
    parser.add_argument(
        "--noinput",
        "--no-input",
        action="store_false",
        dest="interactive",
        help="do not ask; needed without a terminal",
    )
