"""Raw driver connections to SQL Server, from an alias's own settings: encryption, tokens, extra parameters are kept."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from django_sqlsem.database import sockets as database_sockets
from django_sqlsem.database.dialects import answer_limit, limit_logins
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: What a lock connection must not have: a driver that reconnects by itself would come back without the locks, and a
#: readable secondary has a lock manager of its own.
_UNWANTED: Final = re.compile(
    r"\s*(ConnectRetryCount|ConnectRetryInterval|RetryExec|ApplicationIntent|APP|Timeout|MARS_Connection)\s*=", re.I
)


#: Signals of what goes wrong in the thread itself.
_FAULTS: Final = {
    getattr(signal, name) for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV") if hasattr(signal, name)
}
OTHER_PROCEDURES: Final = (
    "its stored procedures are not those of this version of django-sqlsem. Run 'manage.py locks sql --apply', or have a"
    " DBA run what it prints without --apply."
)
#: A batch that does not wait takes no longer than this, in seconds, or the server does not answer.
ANSWER_TIMEOUT: Final = 5


def answer_timeout(alias: str) -> int:
    """Return for how many seconds a batch that does not wait may take: as the alias's ``query_timeout`` says."""
    return answer_limit(connections[alias].settings_dict.get("OPTIONS") or {}, ANSWER_TIMEOUT)


def connect(
    alias: str, in_turn: Callable[[], object]
) -> tuple[Any, BaseDatabaseWrapper, list[database_sockets.Socket]]:
    """Open a connection in autocommit to the database that an alias means now.

    One at a time in a process; ``in_turn`` is called when its turn has come, and what it raises is raised. Returns
    the driver's connection, the Django wrapper that knows how to make one, and its socket. Raises
    Django's database errors.
    """
    wrapper = connections[alias].copy()
    parameters = copy.deepcopy(wrapper.get_connection_params())
    options = parameters["OPTIONS"] = dict(parameters.get("OPTIONS") or {})
    limit_logins(options)
    options["query_timeout"] = 0
    options["extra_params"] = ";".join(filter(None, [_kept(options.get("extra_params")), *_ours(alias, options)]))

    def connect_now() -> Any:
        in_turn()
        raw = _undisturbed(lambda: wrapper.get_new_connection(parameters))
        raw.autocommit = True
        return raw

    with wrapper.wrap_database_errors:
        port = database_sockets.port_in(wrapper.settings_dict)
        raw, sockets = database_sockets.opening(connect_now, port, int(options["connection_timeout"]))
    return raw, wrapper, sockets


def _undisturbed(login: Callable[[], Any]) -> Any:
    """Keep signals from this thread: a login by Microsoft's ODBC driver fails if one strikes it, whatever it is for.

    Handlers that are written in Python would run after the login in any case.
    """
    mask = getattr(signal, "pthread_sigmask", None)
    if mask is None:  # on Windows
        return login()
    before = mask(signal.SIG_BLOCK, ())
    try:
        mask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        return login()
    except SystemError as error:  # pyodbc calls Python within, and overlooks what a handler raises there
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
    finally:
        mask(signal.SIG_SETMASK, before)


def _kept(extra: str | None) -> str:
    """Return the alias's own extra parameters but for those that lock connections must not have."""
    return ";".join(part for part in split(extra or "") if not _UNWANTED.match(part))


def _ours(alias: str, options: dict[str, Any]) -> list[str]:
    driver = str(options.get("driver", "ODBC Driver 18 for SQL Server"))
    if options.get("python_driver"):
        return ["ConnectRetryCount=0"]  # it refuses a name of the application's own
    name = f"APP=sqlsem/{re.sub(r'[^A-Za-z0-9_.-]', '_', alias)}"
    return [name, "ConnectRetryCount=0", "MARS_Connection=no"] if "ODBC Driver" in driver else [name]


#: One ``key=value`` part: a value in braces may have semicolons, and two closing braces for one.
_PART: Final = re.compile(r"(?:=\s*\{(?:[^}]|\}\})*(?:\}|\Z)|[^;])+")


def split(extra: str) -> list[str]:
    """Return the ``key=value`` parts of ODBC parameters."""
    return [part.strip() for part in _PART.findall(extra) if part.strip()]


class AnswerRow(dict[str, Any]):
    """A row by column."""

    def __missing__(self, column: str) -> Any:
        raise BackendError(
            f"The database answered without {column!r}, but with {', '.join(self) or 'nothing'}: {OTHER_PROCEDURES}"
        )


def results_of(cursor: Any) -> list[list[dict[str, Any]]]:
    """Return all the results of what a cursor has run that have columns, each as rows by column."""
    found: list[list[dict[str, Any]]] = []
    while True:
        if cursor.description is not None:
            names = [column[0] for column in cursor.description]
            found.append([AnswerRow(zip(names, row, strict=True)) for row in cursor.fetchall()])
        if not cursor.nextset():
            return found
