"""The stored procedures in ``sql/``: how they get into a database, and whether those of this version are there."""

from __future__ import annotations

import functools
import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.utils import Error

from django_sqlsem.backends.applock.calls import SCHEMA, files
from django_sqlsem.database.errors import database_errors
from django_sqlsem.database.sqlserver import Meaning, meaning
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: For programs; what else is installed begins with ``internal_``, and is no interface.
PUBLIC: Final = ("acquire", "release", "prove", "status")
#: The procedure that tells which version is installed, to whoever may execute it.
VERSION: Final = "version"
#: The schema of the tables as the files write it.
_TABLES: Final = re.compile(r"\bdbo\.(?=sqlsem_)")

_FIRST: Final = f"""-- The stored procedures of django-sqlsem: see docs/backends/tsql.md.
-- Made by "manage.py locks sql"; with --apply it runs the same. What Django's login needs, and any other program's:
--   GRANT EXECUTE ON SCHEMA::{SCHEMA} TO [app];
SET QUOTED_IDENTIFIER ON;
"""
_CREATE_SCHEMA: Final = (
    f"IF SCHEMA_ID(N'{SCHEMA}') IS NULL\n    EXEC (N'CREATE SCHEMA {SCHEMA} AUTHORIZATION {{owner}};');\n"
)
_DROP_SCHEMA: Final = (
    f"IF SCHEMA_ID(N'{SCHEMA}') IS NOT NULL"
    f" AND NOT EXISTS (SELECT 1 FROM sys.objects WHERE schema_id = SCHEMA_ID(N'{SCHEMA}'))\n"
    f"    EXEC (N'DROP SCHEMA {SCHEMA};');\n"
)


@functools.cache
def version() -> str:
    """Return what tells the procedures of this package from those of another version: a digest of their texts."""
    return hashlib.sha256("\0".join(files().values()).encode()).hexdigest()[:16]


def batches(*, tables: str = "dbo", owner: str = "dbo", drop: bool = False) -> tuple[str, ...]:
    """Return the batches that install the procedures, or remove them. Either may be run again and again.

    ``tables``: the schema of the lock tables; ``owner``: of that schema. A procedure is altered, never dropped: it
    keeps what was granted on it. Those of other versions stay, as their processes may still run.
    """
    if drop:
        names = [VERSION, *PUBLIC, *sorted(set(files()) - set(PUBLIC))]
        return (*(f"DROP PROCEDURE IF EXISTS {SCHEMA}.{name};\n" for name in names), _DROP_SCHEMA)
    tables, owner = _quoted(tables), _quoted(owner)
    told = f"CREATE OR ALTER PROCEDURE {SCHEMA}.{VERSION}\nAS\nSELECT N'{version()}' AS version;\n"
    found = [_FIRST, "SET ANSI_NULLS ON;\n", _CREATE_SCHEMA.format(owner=owner.replace("'", "''"))]
    for name, text in {**files(), VERSION: told}.items():
        # A stand-in for SQL Server knows no CREATE OR ALTER.
        known = f"OBJECT_ID(N'{SCHEMA}.{name}', N'P')"
        found.append(f"IF {known} IS NULL\n    EXEC (N'CREATE PROCEDURE {SCHEMA}.{name} AS RETURN 0;');\n")
        altered = text.replace("CREATE OR ALTER PROCEDURE", "ALTER PROCEDURE", 1)
        found.append(_TABLES.sub(lambda _: f"{tables}.", altered))
    return tuple(found)


def install(connection: BaseDatabaseWrapper) -> None:
    """Install the procedures, but for those whose text is there already.

    Raises ``BackendError`` that names the way out.
    """
    with database_errors(connection.alias), connection.cursor() as cursor:
        tables, owner = _schema_of_tables(cursor)
        try:
            for text in batches(tables=tables, owner=owner):
                if not _is_there(cursor, text):
                    cursor.execute(text)
        except Error as error:
            if meaning(error) is not Meaning.FORBIDDEN:
                raise
            raise BackendError(
                f"The login of {connection.alias!r} may not create the schema {SCHEMA!r} or procedures in it. Have a"
                f" DBA run what 'manage.py locks sql --database {connection.alias}' prints, then migrate again."
            ) from error


def remove(connection: BaseDatabaseWrapper) -> None:
    """Remove the procedures, and their schema if nothing else is in it."""
    with database_errors(connection.alias), connection.cursor() as cursor:
        for text in batches(drop=True):
            cursor.execute(text)


def installed(connection: BaseDatabaseWrapper) -> str | None:
    """Return the version that is installed; ``None``: none is, or this login may not execute it."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"EXEC {SCHEMA}.{VERSION}")
            return str(cursor.fetchone()[0])
    except Error:
        return None


def for_alias(alias: str, *, drop: bool) -> tuple[str, ...]:
    """Return the batches for the database of an alias, as they are printed."""
    if drop:
        return batches(drop=True)
    with database_errors(alias), connections[alias].cursor() as cursor:
        tables, owner = _schema_of_tables(cursor)
    return batches(tables=tables, owner=owner)


def _schema_of_tables(cursor: Any) -> tuple[str, str]:
    """Return the schema of the lock tables and its owner: procedures of another owner could not read the tables."""
    cursor.execute(
        "SELECT s.name, USER_NAME(s.principal_id) FROM sys.tables AS t JOIN sys.schemas AS s"
        " ON s.schema_id = t.schema_id WHERE t.name = N'sqlsem_slot'"
        " ORDER BY CASE s.name WHEN SCHEMA_NAME() THEN 0 ELSE 1 END, s.name"  # which of several is this login's
    )
    row = cursor.fetchone()
    return (str(row[0]), str(row[1] or "dbo")) if row else ("dbo", "dbo")


def _quoted(name: str) -> str:
    return name if name == "dbo" else f"[{name.replace(']', ']]')}]"


def _is_there(cursor: Any, text: str) -> bool:
    """Whether a procedure has this very text: to alter one keeps its callers out, and has it compiled anew."""
    found = re.search(r"^ALTER PROCEDURE (\S+)", text, re.MULTILINE)
    if found is None:
        return False
    cursor.execute(f"SELECT definition FROM sys.sql_modules WHERE object_id = OBJECT_ID(N'{found[1]}', N'P')")
    row = cursor.fetchone()
    return row is not None and row[0] is not None and _body(str(row[0])) == _body(text)


def _body(text: str) -> str:
    """Return a procedure's text from its name on: the server rewrites what comes before."""
    return " ".join(text.partition("PROCEDURE")[2].split())
