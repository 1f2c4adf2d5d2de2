"""The verbs of ``manage.py locks``, a module each.

``add_arguments`` declares what a verb takes, and ``handle`` does it.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from django.utils.translation import gettext_noop

#: The verbs, in the order of the help, and what it says of each.
VERBS: Final = {
    "list": gettext_noop("Lists holders, waiters and idle names; the names that one template has made are one line."),
    "show": gettext_noop("Shows all about one semaphore."),
    "waits": gettext_noop(
        "Shows waits of those that hold something else, and deadlocks; ends with 1 if there is a deadlock."
    ),
    "purge": gettext_noop(
        "Frees slots whose lease has run out, or whose session has ended. Never touches a live holder."
    ),
    "revoke": gettext_noop("Takes slots away from their holders, live ones too. They learn that their permit is lost."),
    "stop": gettext_noop("Asks holders to stop. Nothing is taken from them: they decide when they leave."),
    "drain": gettext_noop("Grants nothing more until it is resumed, and asks all holders to stop."),
    "set": gettext_noop("Sets the number of slots, or stops and resumes granting."),
    "doctor": gettext_noop("Examines the settings and each database that keeps locks, and says what it finds."),
    "sql": gettext_noop(
        "SQL Server: prints the stored procedures that take and give back locks, for a DBA who installs them by hand."
    ),
    "run": gettext_noop(
        "Runs a command under a semaphore. It gets SIGTERM, SIGINT and SIGHUP, and is stopped if the permit is lost."
    ),
}
#: What ``manage.py locks`` alone does.
ALONE: Final = "list"


def load(verb: str) -> Any:
    """Import the module of a verb."""
    return importlib.import_module(f"{__name__}.{verb}")
