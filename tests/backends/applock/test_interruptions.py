"""Application locks whose threads are struck, whose rows are locked, or whose drivers fail: what the others notice."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.applock import calls, reading
from django_sqlsem.backends.applock.acquire import Claims
from django_sqlsem.backends.applock.possession import Possession
from django_sqlsem.backends.applock.sessions import LockSession
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.locks import rwlock
from tests.backends.applock.plain import ALIAS, Session, skip_unless_covered
from tests.backends.applock.test_attacks import detached, keep_from_looking, known, slot_is_free
from tests.support.databases import raw_connection
from tests.support.interruptions import SoftLimit
from tests.support.processes import Child
from tests.support.threads import run_beside, run_in_threads, wait_until

skip_unless_covered()
pytestmark = [pytest.mark.usefixtures("committed")]


class StruckCursor:
    """A driver's cursor whose reader is struck while there are rows left."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def fetchall(self) -> list[Any]:
        raise SoftLimit("struck")


class StruckConnection:
    """A driver's connection with such cursors."""

    def __init__(self, raw: Any) -> None:
        vars(self)["raw"] = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.raw, name, value)

    def cursor(self) -> StruckCursor:
        return StruckCursor(self.raw.cursor())


def test_a_struck_look_costs_no_permit_of_its_session():
    """What it has not read would be in the way of the session's next statement, for as long as the error is kept."""
    for name in ("struck", "other"):
        known(name)
    held = [detached(semaphore(name, using=ALIAS)) for name in ("struck", "other")]
    backend: Any = get_backend(ALIAS)
    [session] = {backend.pool.holder(each._acquisition.request.permit_id)[0] for each in held}
    raw, session._raw = session._raw, StruckConnection(session._raw)
    with pytest.raises(SoftLimit) as caught:
        session.results(calls.READ, reading.wish(None))
    session._raw = raw
    assert run_in_threads(1, lambda _nth: held[1].release()) == [None]
    assert held[0].lost is None
    held[0].check()
    held[0].release()
    assert not session.ended
    del caught


WAITER = """
from django_sqlsem.locks import rwlock
from django_sqlsem.core.names import resource_for
lock = rwlock(args[0], readers=2, using=args[1])
say("asks")
permit = lock.upgradable().acquire(timeout=100)
say("has")
listen()
permit.release()
"""


def test_a_writer_waits_behind_upgradable_readers_for_longer_than_a_statement_may_take():
    """It stands first among those who wait for slots, and not yet among those who want to write."""
    lock = rwlock("patient", readers=2, using=ALIAS)
    with lock.write():
        pass
    reader = detached(lock.upgradable())
    backend: Any = get_backend(ALIAS)
    limit = backend.pool.holder(reader._acquisition.request.permit_id)[0].limit
    with Child(WAITER, "patient", ALIAS) as other, contextlib.closing(Session()) as observer:
        other.expect("asks", timeout=60)
        rows = "SELECT COUNT(*) FROM sqlsem_waiter"
        wait_until(lambda: observer.value(rows) == 1, timeout=60)
        permits: list[Any] = []

        def write(number: int) -> None:
            if number == 0:
                with pytest.raises(AcquireTimeoutError):
                    lock.write().acquire(timeout=2)
            else:
                permits.append(lock.write().acquire(timeout=100))
                permits[0].release()

        both = threading.Thread(target=run_in_threads, args=(2, write))
        both.start()
        time.sleep(limit + 6)  # a statement that may not take so long would have ended by now
        assert both.is_alive()
        reader.release()
        other.expect("has", timeout=60)
        other.send()
        other.finish()
        both.join(60)
    assert [each.lost for each in permits] == [None]


def test_an_upgradable_reader_that_has_stopped_while_it_waited_is_one_and_a_writer_waits_until_it_is_killed():
    """The server goes on with its wait: it has the writer's place, and is a holder that has stopped."""
    lock = rwlock("stopped", readers=2, using=ALIAS)
    with lock.write():
        pass
    reader = detached(lock.upgradable())
    place = lock_names("stopped").slot(0)
    with Child(WAITER, "stopped", ALIAS) as other, contextlib.closing(Session()) as observer:
        other.expect("asks", timeout=60)
        wait_until(lambda: observer.value("SELECT COUNT(*) FROM sqlsem_waiter") == 1, timeout=60)
        other.stop(anywhere=True)
        reader.release()
        wait_until(lambda: observer.test(place) == 0, timeout=20)
        with lock.read(timeout=20):  # beside which readers may be
            pass
        with pytest.raises(AcquireTimeoutError):
            lock.write().acquire(timeout=1)
        other.kill()
        lock.write().acquire(timeout=20).release()


@pytest.mark.parametrize("error", [RuntimeError("the server sent no result"), TypeError("'NoneType' is no row")])
def test_a_slot_for_nobody_that_cannot_be_given_back_for_any_reason_goes_with_its_session(monkeypatch, error):
    made = known("any reason", slots=1)
    held = [detached(made)]
    backend: Any = get_backend(ALIAS)
    failed = threading.Event()
    real, give_up = LockSession.run, Possession.give_up

    def run(self: Any, call: Any, values: Any, **options: Any) -> Any:
        if self.waiting and call is calls.RELEASE and not failed.is_set():
            failed.set()
            raise error
        return real(self, call, values, **options)

    def give_up_late(self: Any, session: Any, claim: Any) -> None:
        with contextlib.suppress(type(error)):
            give_up(self, session, claim)

    attempt = Claims.attempt

    def attempt_late(self: Any, session: LockSession, asked: Any, timeout: Any, **options: Any) -> Any:
        if timeout != 0 and held:
            line = backend._lines[asked.line]
            wait_until(lambda: not line.wanted, timeout=60)
            run_beside(held.pop().release).result(60)
        return attempt(self, session, asked, timeout, **options)

    monkeypatch.setattr("django_sqlsem.backends.applock.line.Line._give_up", lambda line: None)
    keep_from_looking(monkeypatch)
    monkeypatch.setattr(Claims, "attempt", attempt_late)
    monkeypatch.setattr(Possession, "give_up", give_up_late)
    monkeypatch.setattr(LockSession, "run", run)
    with pytest.raises(AcquireTimeoutError):
        made.acquire(timeout=2)
    assert failed.wait(60)
    with contextlib.closing(Session()) as observer:
        wait_until(lambda: slot_is_free(observer, "any reason", 1), timeout=20)


def test_rows_that_another_transaction_keeps_locked_for_a_while_are_waited_for():
    """Longer than one call waits: of a name that somebody else is just making."""
    known("some other name")
    waits = threading.Event()
    real = LockSession.run

    def run(self: Any, call: Any, values: Any, **options: Any) -> Any:
        try:
            return real(self, call, values, **options)
        except Exception:
            waits.set()
            raise

    lock = semaphore("in the making", slots=2, using=ALIAS)
    key = resource_for("in the making", "semaphore").key
    with contextlib.closing(raw_connection(ALIAS)) as raw, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LockSession, "run", run)
        cursor = raw.cursor()
        cursor.execute("BEGIN TRANSACTION")
        cursor.execute(
            "INSERT INTO sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)"
            " VALUES (?, 'in the making', 'semaphore', 2, 1, 0, 0)",
            (key,),
        )
        asker = threading.Thread(target=lambda: lock.acquire(timeout=60).release())
        asker.start()
        assert waits.wait(30), "it has waited for as long as one call does"
        cursor.execute("COMMIT TRANSACTION")
        asker.join(30)
    assert lock.status().held == 0
