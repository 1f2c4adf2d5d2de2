"""Which of a driver's errors are an outage, and that the log hears of one twice."""

from __future__ import annotations

import logging
import re
import sqlite3

import psycopg
import pytest
from django.db import DataError, InterfaceError, InternalError, OperationalError, ProgrammingError
from psycopg import errors as postgresql
from pymysql import err as mysql

from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database.errors import Outage, backend_error, is_outage

pytestmark = pytest.mark.process_side


def sqlite_error(code):
    error = sqlite3.OperationalError("it is locked")
    error.sqlite_errorcode = code
    return error


AWAY = {
    "refused": psycopg.OperationalError("connection failed: connection to server at ... failed: Connection refused"),
    "timeout": psycopg.errors.ConnectionTimeout("connection timeout expired"),
    "starts up": psycopg.OperationalError("connection failed: FATAL:  the database system is starting up"),
    "too many at the login": psycopg.OperationalError("connection failed: FATAL:  sorry, too many clients already"),
    "lost": psycopg.OperationalError("the connection is lost"),
    "57P01": postgresql.AdminShutdown("terminating connection due to administrator command"),
    "57P02": postgresql.CrashShutdown("terminating connection because of crash of another server process"),
    "57P03": postgresql.CannotConnectNow("the database system is shutting down"),
    "53300": postgresql.TooManyConnections("sorry"),
    "08006": postgresql.ConnectionFailure("it failed"),
    "40001": postgresql.SerializationFailure("could not serialize"),
    "40P01": postgresql.DeadlockDetected("deadlock detected"),
    **{
        str(number): mysql.OperationalError(number, "")
        for number in (1040, 1047, 1053, 1203, 1213, 2002, 2003, 2006, 2013)
    },
    "0": mysql.InterfaceError(0, ""),
    "busy": sqlite_error(sqlite3.SQLITE_BUSY),
}
NO_OUTAGE = {
    "password": psycopg.OperationalError("connection failed: FATAL:  password authentication failed for user 'x'"),
    "no role": psycopg.OperationalError('connection failed: FATAL:  role "x" does not exist'),
    "no entry": psycopg.OperationalError('connection failed: FATAL:  no pg_hba.conf entry for host "h"'),
    "no such host": psycopg.OperationalError("could not translate host name 'x' to address"),
    "no table": postgresql.UndefinedTable('relation "sqlsem_slot" does not exist'),
    "denied": postgresql.InsufficientPrivilege("permission denied for table sqlsem_slot"),
    "disk full": postgresql.DiskFull("no space left on device"),
    "locked rows": postgresql.LockNotAvailable("canceling statement due to lock timeout"),
    "too long": postgresql.QueryCanceled("canceling statement due to statement timeout"),
    **{str(number): mysql.OperationalError(number, "") for number in (1044, 1045, 1049, 1142, 1205, 1969)},
    "no such table": mysql.ProgrammingError(1146, "Table 'x.sqlsem_slot' doesn't exist"),
    "no file": sqlite_error(sqlite3.SQLITE_CANTOPEN),
    "bad data": psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"),
}
READ_ONLY = {
    "25006": postgresql.ReadOnlySqlTransaction("cannot execute UPDATE in a read-only transaction"),
    "1290": mysql.OperationalError(1290, "running with the --read-only option"),
}


def of_django(error):
    """Return what Django makes of a driver's error."""
    kinds = (DataError, ProgrammingError, InternalError, InterfaceError, OperationalError)
    names = {each.__name__ for each in type(error).__mro__}
    made = next(kind for kind in kinds if kind.__name__ in names)(*error.args)
    made.__cause__ = error
    return made


def failed(error):
    """Return what the library makes of that."""
    made = backend_error("default", error)
    made.__cause__ = error
    return made


@pytest.mark.parametrize("error", AWAY.values(), ids=AWAY)
def test_it_will_pass(error):
    assert is_outage(of_django(error), known=False)


@pytest.mark.parametrize("error", NO_OUTAGE.values(), ids=NO_OUTAGE)
def test_no_waiting_would_help(error):
    assert not is_outage(of_django(error), known=True)


@pytest.mark.parametrize("error", READ_ONLY.values(), ids=READ_ONLY)
def test_read_only_is_an_outage_of_a_server_that_took_writes(error):
    assert is_outage(of_django(error), known=True)
    assert not is_outage(of_django(error), known=False)


def test_the_log_hears_of_an_outage_twice(caplog):
    caplog.set_level(logging.DEBUG, logger="django_sqlsem")
    outage, error = Outage("default"), of_django(AWAY["refused"])
    for _ in range(2):
        for _ in range(30):
            met = failed(error)
            assert outage.met(met)
            assert met.outage
            assert 0 < outage.again_at - boot_now() <= 1.5
            outage.again_at = 0.0  # as if the pause were over
        outage.over()
        outage.over()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING"] * 4
    assert "'default' is away: connection failed: connection to server at ... failed: Connection refused." in told[0][1]
    assert re.search(r"'default' is back, \d+\.\d s after it failed: connection failed", told[1][1])
    assert not outage.met(failed(of_django(NO_OUTAGE["denied"])))
    assert len(caplog.records) == 4
