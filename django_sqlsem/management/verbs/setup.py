"""What is done once for a database: examine it, and install the stored procedures that SQL Server needs."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import Any, Final

from django.core.checks import DEBUG, ERROR, INFO, WARNING, CheckMessage
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext, gettext_noop, ngettext, pgettext_lazy

from django_sqlsem import control
from django_sqlsem.checks import doctor
from django_sqlsem.core.text import check_page
from django_sqlsem.management import arguments, output
from django_sqlsem.management.verbs import Verb

#: What the levels of Django's messages are called in JSON, and for people; their colours.
LEVEL_WORDS: Final = {ERROR: "error", WARNING: "warning", INFO: "note", DEBUG: "ok"}
_LEVELS: Final = {
    ERROR: pgettext_lazy("level", "error"),
    WARNING: pgettext_lazy("level", "warning"),
    INFO: pgettext_lazy("level", "note"),
    DEBUG: pgettext_lazy("level", "ok"),
}
_STYLES: Final = {ERROR: "ERROR", WARNING: "WARNING", INFO: "NOTICE", DEBUG: "SUCCESS"}
#: Prints sentences behind their level.
_WRAPPER: Final = textwrap.TextWrapper(91, break_long_words=False, break_on_hyphens=False)
#: Those procedures that batches make or remove, and that are for everybody.
_PROCEDURE: Final = re.compile(r"^(?:ALTER|DROP) PROCEDURE (?:IF EXISTS )?(\w+\.(?!internal)\w+)", re.MULTILINE)


class Doctor(Verb):
    help = gettext_noop("Examines the settings and each database that keeps locks, and says what it finds.")

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        told = gettext("the same as --database")
        arguments.add_database(parser, "--using", told)
        arguments.add_format(parser, "text", "json")
        told = gettext("take no lock, kill no child")
        parser.add_argument("--no-acquire", action="store_false", dest="acquire", help=told)

    def handle(self) -> None:
        """Examine, print what is found as it is found, and end with 1 if one is an error."""
        found: list[CheckMessage] = []
        for message in doctor.examine(self.given.database, acquire=self.given.acquire):
            if self.given.format == "text":
                if not found or message.obj != found[-1].obj:
                    told = gettext("Database %(alias)s:") if message.obj else gettext("Settings:")
                    self.say(told % {"alias": repr(message.obj)})
                self._print(message)
                self.stdout.flush()  # some of what comes takes a while
            found.append(message)
        if self.given.format == "json":
            self.say(json.dumps([as_dict(each) for each in found], indent=2))
        else:
            self.say(_summary(found))
        if any(each.level >= ERROR for each in found):
            sys.exit(1)

    def _print(self, message: CheckMessage) -> None:
        first, *more = [
            line for text in (message.msg, message.hint or "") for line in _WRAPPER.wrap(output.clean(str(text)))
        ]
        level = getattr(self.style, _STYLES[message.level])(f"{_LEVELS[message.level]!s:<9}")
        self.say(f"{level}{first}")
        self.lines(more, " " * 9)


def _summary(found: list[CheckMessage]) -> str:
    errors, warnings, notes = (sum(each.level == level for each in found) for level in (ERROR, WARNING, INFO))
    told = []
    if errors:
        told.append(ngettext("%(count)d error", "%(count)d errors", errors) % {"count": errors})
    if warnings:
        told.append(ngettext("%(count)d warning", "%(count)d warnings", warnings) % {"count": warnings})
    if notes:
        told.append(ngettext("%(count)d note", "%(count)d notes", notes) % {"count": notes})
    return gettext("Found %(what)s.") % {"what": ", ".join(told)} if told else gettext("All is well.")


def as_dict(message: CheckMessage) -> dict[str, Any]:
    """Return a message for programs."""
    return {
        "id": message.id,
        "level": LEVEL_WORDS[message.level],
        "database": message.obj or "",
        "text": str(message.msg),
        "advice": (message.hint or "").rpartition("See ")[0].strip(),
        "docs": check_page(message.id or ""),
    }


class Sql(Verb):
    help = gettext_noop(
        "SQL Server: prints the stored procedures that take and give back locks, for a DBA who installs them by hand."
    )

    @staticmethod
    def add_arguments(parser: CommandParser) -> None:
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--apply", action="store_true", help=gettext("install them"))
        what.add_argument("--drop", action="store_true", help=gettext("remove them"))
        arguments.add_noinput(parser)

    def handle(self) -> None:
        """Print a script for sqlcmd or Management Studio; or say what will be done, ask, and do it."""
        drop, using = self.given.drop, self.given.database
        batches = control.procedures(drop=drop, using=using)
        if not batches:
            raise CommandError(gettext("Nothing to do: these are for semaphores on SQL Server's application locks."))
        if not self.given.apply and not drop:
            self.say("\nGO\n".join(batch.rstrip("\n") for batch in (*batches, "")))
            return
        names = ", ".join(sorted(_PROCEDURE.findall("\n".join(batches))))
        told = gettext("To be installed in the database: %(names)s, and what Django itself uses.")
        if drop:
            told = gettext(
                "To be removed from the database: %(names)s, and what Django itself uses. Afterwards no process can"
                " take a lock."
            )
        self.say(told % {"names": names})
        if self.agreed():
            control.change_procedures(drop=drop, by=self.by, using=using)
            self.done(gettext("Removed.") if drop else gettext("Installed."))
