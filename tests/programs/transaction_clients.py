"""Processes that lock in transactions of their own, as they are told; nothing but lines connects them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

from django.db import connections, transaction

from django_sqlsem import AcquireTimeoutError, DeadlockError
from django_sqlsem.locks import locked_atomic, table_lock, transaction_lock
from django_sqlsem.locks.transaction.key_rows import Attempt
from django_sqlsem.locks.transaction.mysql import MySQLLocking
from django_sqlsem.locks.transaction.postgresql import PostgreSQLLocking
from django_sqlsem.locks.transaction.sqlite import SQLiteLocking
from django_sqlsem.locks.transaction.sqlserver import ApplockLocking
from tests.support.children import listen, say
from tests.support.databases import child_environment
from tests.support.processes import Child

_saying = threading.Lock()


def tell(line: str) -> None:
    """Say a line, one thread at a time."""
    with _saying:
        say(line)


def announce_waits() -> None:
    """Say ``waits`` once the database has refused a lock that will now be waited for, ``marked`` before a begin."""
    for locking in (PostgreSQLLocking, MySQLLocking):
        real_wait = locking.wait

        def wait(self: Any, *args: Any, real: Any = real_wait) -> Attempt:
            tell("waits")
            return real(self, *args)

        locking.wait = wait
    real_lock = ApplockLocking.lock

    def lock(self: Any, wanted: Any, timeout: float | None, **options: Any) -> float | None:
        found = real_lock(self, wanted, 0, **options)
        if found is not None or timeout == 0:
            return found
        tell("waits")
        found = real_lock(self, wanted, timeout, **options)
        return max(found, 1e-6) if found is not None else None

    ApplockLocking.lock = lock  # type: ignore[method-assign]
    real_write, real_mark, said = SQLiteLocking._write, SQLiteLocking.mark, threading.local()

    def write(self: Any, wanted: Any) -> Any:
        found = real_write(self, wanted)
        if found is None and not getattr(said, "waits", False):
            tell("waits")
        said.waits = found is None
        return found

    def mark(self: Any, wanted: Any) -> Any:
        found = real_mark(self, wanted)
        said.waits = False
        tell("marked")
        return found

    SQLiteLocking._write, SQLiteLocking.mark = write, mark


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """A room for one: a file that must not exist. SQLite's one writer leaves no room for a counter in the database."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    try:
        yield
    finally:
        os.unlink(path)


def crowd(alias: str, path: str, form: str, names: list[str], count: int) -> None:
    """For each name ``count`` threads ask at once; who has not waited works until told, the others leave at once."""
    announce_waits()
    errors: list[BaseException] = []
    for name in names:
        work, barrier = threading.Event(), threading.Barrier(count + 1)

        def enter(name: str = name, work: Any = work, barrier: Any = barrier) -> None:
            try:
                connections[alias].ensure_connection()
                barrier.wait(30)
                with _locked(form, alias, name) as permit, alone(path):
                    if permit.waited == 0:
                        tell("works")
                        assert work.wait(60)
                tell("left")
            except BaseException as error:
                errors.append(error)
                tell(f"failed {error!r}")
            finally:
                connections.close_all()

        threads = [threading.Thread(target=enter) for _ in range(count)]
        for thread in threads:
            thread.start()
        tell("ready")
        assert listen() == "go"
        barrier.wait(30)
        assert listen() == "finish"
        work.set()
        for thread in threads:
            thread.join(60)
        assert not errors
        tell("done")


@contextlib.contextmanager
def _locked(form: str, alias: str, name: str) -> Iterator[Any]:
    if form == "block":
        with locked_atomic(name, timeout=60, using=alias) as permit:
            yield permit
    else:
        with transaction.atomic(using=alias):
            yield transaction_lock(name, timeout=60, using=alias)


def waiters(alias: str, path: str, name: str, count: int) -> None:
    """So many threads lock one after the other."""
    announce_waits()

    def enter() -> None:
        try:
            with transaction.atomic(using=alias):
                transaction_lock(name, timeout=60, using=alias)
                with alone(path):
                    pass
            tell("left")
        except BaseException as error:
            tell(f"failed {error!r}")
        finally:
            connections.close_all()

    threads = [threading.Thread(target=enter) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)


def obey(alias: str) -> None:
    """Do what the parent's lines say, until one says ``end``."""
    from django.contrib.auth.models import User

    announce_waits()
    connection = connections[alias]
    blocks: list[transaction.Atomic] = []
    say("ready")
    while (line := listen()) != "end":
        verb, _, rest = line.partition(" ")
        try:
            if verb == "begin":  # or a savepoint, inside
                blocks.append(transaction.atomic(using=alias))
                blocks[-1].__enter__()
                say("began")
            elif verb in ("commit", "rollback"):
                error = None if verb == "commit" else ZeroDivisionError()
                blocks.pop().__exit__(type(error) if error else None, error, None)
                say("ended")
            elif verb in ("lock", "table"):
                options = json.loads(rest)
                name = options.pop("name", None)
                given = {"using": alias, **options}
                permit = transaction_lock(name, **given) if verb == "lock" else table_lock(User, **given)
                say(f"locked {permit.waited}")
            elif verb == "sql":
                with connection.cursor() as cursor:
                    cursor.execute(rest)
                    rows = cursor.fetchall() if cursor.description else []
                say(f"rows {json.dumps(rows, default=str)}")
        except AcquireTimeoutError:
            say("busy")
        except DeadlockError as error:
            say(f"deadlock {error}")
        except Exception as error:
            say(f"error {type(error).__name__} {str(error).splitlines()[0]}")


class Transactor(Child):
    """The parent's side of ``obey``."""

    def __init__(self, alias: str, env: dict[str, str] | None = None) -> None:
        super().__init__("tests.programs.transaction_clients:obey", alias, env=env or deferred(alias))
        self.expect("ready", timeout=60)

    def begin(self) -> None:
        """Begin a transaction, or a savepoint inside one."""
        self.tell("begin", "began")

    def tell(self, line: str, answer: str, timeout: float = 30) -> str:
        """Send a line and expect an answer."""
        self.send(line)
        return self.expect(answer, timeout=timeout)

    def ask(self, name: str, verb: str = "lock", **options: Any) -> None:
        """Have it ask for a lock."""
        self.send(f"{verb} {json.dumps({'name': name} | options)}")

    def lock(self, name: str, verb: str = "lock", **options: Any) -> float:
        """Have it get a lock at once, or after a wait that it says nothing of. Return what it says it waited."""
        self.ask(name, verb, **options)
        return float(self.expect("locked", timeout=30))

    def wait_for(self, name: str, verb: str = "lock", **options: Any) -> None:
        """Have it ask for a lock that is taken, and wait until it waits."""
        self.ask(name, verb, **options)
        self.expect("waits", timeout=30)

    def locked(self) -> float:
        """Return how long it has waited, once it has the lock."""
        return float(self.expect("locked", timeout=60))

    def busy(self, name: str, verb: str = "lock") -> None:
        """Have it find a lock taken."""
        self.ask(name, verb, timeout=0)
        while (line := self.expect()) in ("waits", "marked"):
            pass
        assert line == "busy", line

    def sql(self, statement: str) -> Any:
        """Run a statement on its connection and return the rows."""
        return json.loads(self.tell(f"sql {statement}", "rows"))

    def expect(self, expected: str = "", timeout: float = 20.0) -> str:
        """Wait for a line, past the marks that nobody has asked for."""
        line = super().expect(timeout=timeout)
        while line == "marked" or (line == "waits" and expected in ("locked", "busy", "deadlock")):
            line = super().expect(timeout=timeout)
        if expected and line != expected and not line.startswith(f"{expected} "):
            raise AssertionError(f"{line!r} instead of {expected!r}: {self.lines}\n{self.stderr}")
        return line[len(expected) + 1 :] if expected else line


def deferred(alias: str) -> dict[str, str]:
    """Return the environment in which SQLite's transactions begin as Django has them by default, without a lock."""
    databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
    if "sqlite" in databases[alias]["ENGINE"]:
        databases[alias]["OPTIONS"].pop("transaction_mode", None)
    return {"SQLSEM_TEST_DATABASES": json.dumps(databases)}
