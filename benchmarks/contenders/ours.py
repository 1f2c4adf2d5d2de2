"""This package, as a project would use it."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from benchmarks import UNRECORDED
from benchmarks.contenders.base import Contender


def takes(argument: str) -> bool:
    """Return whether ``semaphore()`` has this argument in the version that is measured."""
    from django_sqlsem import semaphore

    return argument in inspect.signature(semaphore).parameters


class Ours(Contender):
    """``semaphore(name, slots)`` with a timeout of none, as the contenders that block in the server have it."""

    kind = "ours"
    options: ClassVar[dict[str, Any]] = {}

    def setup(self) -> None:
        from django_sqlsem import semaphore

        self.semaphore = semaphore(self.name, self.slots, timeout=None, using=self.alias, **self.options)

    def acquire(self) -> None:
        self.permit = self.semaphore.acquire()

    def release(self) -> None:
        self.permit.release()

    def teardown(self) -> None:
        from django_sqlsem.lifecycle import stop_all

        stop_all()


class Postgres(Ours):
    key, database, modules = "django_sqlsem (PostgreSQL)", "postgres", ("psycopg",)


class Mariadb(Ours):
    key, database = "django_sqlsem (MariaDB)", "mariadb"


class Sqlite(Ours):
    key, database = "django_sqlsem (SQLite)", "sqlite"


class Mssql(Ours):
    """On application locks. It counts its calls, since not every server does."""

    key, database, modules = "django_sqlsem (SQL Server)", "mssql", ("mssql",)
    batches = 0

    def setup(self) -> None:
        super().setup()
        from django_sqlsem.backends.applock.sessions import LockSession

        execute, contender = LockSession._execute, self

        def counting(session: LockSession, *args: Any, **kwargs: Any) -> list[list[dict[str, Any]]]:
            contender.batches += 1
            return execute(session, *args, **kwargs)

        LockSession._execute = counting


class MssqlUnrecorded(Mssql):
    """The same without a row beside each lock."""

    key = "django_sqlsem (SQL Server, RECORD=False)"

    def setup(self) -> None:
        self.alias = f"{self.alias}{UNRECORDED}"
        super().setup()


class PostgresFast(Postgres):
    key, options = "django_sqlsem (PostgreSQL, durable=False)", {"durable": False}


# On MariaDB and SQLite durable=False changes nothing.
CONTENDERS: list[type[Contender]] = [Postgres, PostgresFast, Mariadb, Mssql, MssqlUnrecorded, Sqlite]
if not takes("durable"):
    CONTENDERS = [kind for kind in CONTENDERS if "durable" not in getattr(kind, "options", {})]
