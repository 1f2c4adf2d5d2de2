"""What might break the promise of application locks, or stall those who wait for them: each as it was found."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import Any

import pytest
from django.db import Error as DatabaseError
from django.db import connections, transaction

from django_sqlsem import AcquireTimeoutError, BackendError, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.applock.acquire import Answer, Claims, Upgrades
from django_sqlsem.backends.applock.backend import ApplockBackend
from django_sqlsem.backends.applock.line import Line
from django_sqlsem.backends.applock.sessions import LockSession
from django_sqlsem.backends.base import Queue, Request, Waited
from django_sqlsem.checks import sqlserver
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.locks import rwlock
from django_sqlsem.locks.transaction.locks import transaction_lock
from tests.backends.applock.plain import ALIAS, Session, skip_unless_covered
from tests.support.proxy import Proxy, proxy_for
from tests.support.threads import run_beside, run_in_threads, wait_until

skip_unless_covered()
pytestmark = [
    pytest.mark.usefixtures("committed"),
]


def known(name: str, **options: Any) -> Any:
    """Return a semaphore that has its rows, and whose texts the server has seen."""
    made = semaphore(name, using=ALIAS, **options)
    with made:
        pass
    return made


def detached(lock: Any) -> Any:
    """Take a permit that any thread may give back."""
    permit = lock.acquire(timeout=60)
    permit.detach()
    return permit


def keep_from_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its heartbeats, the keeper leaves the waiting to the line."""
    monkeypatch.setattr(ApplockBackend, "wait", lambda *args: Waited((), Queue(ahead=1, told=True)))


def slot_is_free(observer: Session, name: str, slot: int) -> bool:
    return observer.test(lock_names(name).slot(slot)) == 1


def test_a_claim_in_doubt_does_not_stop_the_keeper_while_another_waits():
    first, other = known("doubt", slots=1), known("other", slots=1)
    plain = Session()
    assert plain.get(lock_names("doubt").slot(1)) == 0

    async def wait() -> None:
        with contextlib.suppress(TimeoutError):
            await (await first.aacquire(timeout=120)).arelease()

    async def main() -> None:
        cancelled = asyncio.create_task(wait())
        await asyncio.sleep(1.5)  # it has a place in line, and its claim may be in doubt
        stays = asyncio.create_task(wait())
        await asyncio.sleep(0.3)
        cancelled.cancel()
        await asyncio.sleep(3)  # by now its claim has been looked into a few times
        async with asyncio.timeout(60):
            await (await other.aacquire(timeout=50)).arelease()
        assert not stays.done()
        plain.close()
        await stays

    asyncio.run(main())


def test_an_error_about_one_name_is_raised_and_costs_no_other_permit(monkeypatch):
    """A call that the server refuses for a reason of its own: a full log, a database that is read-only."""
    with known("spared", slots=1) as spared:
        bad = known("bad", slots=2)
        real = LockSession._execute

        def refused(session: LockSession, text: str, *args: Any, **options: Any) -> list[list[dict[str, Any]]]:
            if text == calls.ACQUIRE.text:
                text = f"DECLARE @zero int = 0; SET @zero = 1 / @zero; {text}"
            return real(session, text, *args, **options)

        monkeypatch.setattr(LockSession, "_execute", refused)
        began = time.monotonic()
        with pytest.raises(BackendError):
            semaphore("bad", slots=2, take=2, using=ALIAS).acquire(timeout=0)
        assert time.monotonic() - began < 10
        monkeypatch.undo()
        assert spared.lost is None
        with bad:
            pass
        assert len([each for each in get_backend(ALIAS).pool.sessions() if each.held]) == 1
        assert spared.lost is None


def test_a_row_that_cannot_be_written_costs_the_grant_and_nothing_is_left(monkeypatch):
    """Its locks are free again by the time at which the error is told."""
    made = known("unwritten", slots=2)
    with contextlib.closing(Session()) as observer, known("spared", slots=1) as spared:
        key = resource_for("unwritten", "semaphore").key
        refuses = f"expires_us IS NULL OR semaphore_key <> N'{key}'"
        observer.do(f"ALTER TABLE sqlsem_slot ADD CONSTRAINT testapp_refuses CHECK ({refuses})")
        try:
            for take in (1, 2):
                with pytest.raises(BackendError, match="testapp_refuses"):
                    semaphore("unwritten", slots=2, take=take, using=ALIAS).acquire(timeout=0)
                assert [slot_is_free(observer, "unwritten", nth) for nth in (1, 2)] == [True, True]
                assert observer.test(lock_names("unwritten").base) == 1
        finally:
            observer.do("ALTER TABLE sqlsem_slot DROP CONSTRAINT testapp_refuses")
        spared.check()
        with made:
            pass


def test_a_claim_that_was_cut_leaves_nothing_of_what_an_operator_allowed(monkeypatch):
    made = known("more", slots=1)
    get_backend(ALIAS).set_slots("more", 3)
    held = [made.acquire(timeout=0)]
    held[0].detach()
    held.append(made.acquire(timeout=0))
    held[1].detach()
    real = LockSession._execute

    def struck(session: LockSession, text: str, *args: Any, **options: Any) -> list[list[dict[str, Any]]]:
        found = real(session, text, *args, **options)
        if found[0][0].get("taken") == ",3,":
            monkeypatch.undo()
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(LockSession, "_execute", struck)
    with pytest.raises(KeyboardInterrupt):
        made.acquire(timeout=0)
    with contextlib.closing(Session()) as observer:
        wait_until(lambda: slot_is_free(observer, "more", 3))
        assert not slot_is_free(observer, "more", 2)
    for each in held:
        each.release()


def session_through(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, extra: str = "", **options: Any) -> LockSession:
    settings = connections[ALIAS].settings_dict
    options = settings["OPTIONS"] | {"extra_params": f"{settings['OPTIONS']['extra_params']}{extra}"} | options
    with monkeypatch.context() as patched:
        for key, value in (("HOST", "127.0.0.1"), ("PORT", str(proxy.port)), ("OPTIONS", options)):
            patched.setitem(settings, key, value)
        return LockSession(ALIAS)


def test_a_name_of_another_length_is_sent_with_the_same_types(monkeypatch):
    """Else the server prepares every batch anew, and keeps one more plan of it, for each combination of lengths."""
    with proxy_for(ALIAS) as proxy:
        session = session_through(proxy, monkeypatch, ";Encrypt=no")
        types = []
        for key in ("k", "longer" * 4):
            proxy.heard.clear()
            session.run(calls.FORGET, {"key": key, "permit": key, "slot": 3, "token": 4})
            said = proxy.heard.decode("utf-16-le", "ignore") + proxy.heard[1:].decode("utf-16-le", "ignore")
            said = said.lower()  # FreeTDS writes them in capitals
            types.append(set(re.findall(r"@p1 [a-z]+\([0-9]+\),\s*@p2 [a-z]+\([0-9]+\),\s*@p3 [a-z]+", said)))
        assert types == [{"@p1 nvarchar(32),@p2 nvarchar(32),@p3 int"}] * 2
        session.end("done")


def test_a_silent_server_is_found_out_also_after_a_wait(monkeypatch):
    with proxy_for(ALIAS) as proxy:
        session = session_through(proxy, monkeypatch)
        assert session.can_be_cut, "the proxy opens sockets of its own at the same moment"
        session.run(calls.ProcedureCall("SELECT CONTEXT_INFO() AS stamp", (), ""), {}, waits=True)
        session.prove()
        proxy.silence()
        began = time.monotonic()
        with pytest.raises(BackendError):
            session.prove()
        assert time.monotonic() - began < 30
        assert session.ended


def test_a_login_that_the_server_leaves_half_way_ends(monkeypatch):
    """After each of its answers. Microsoft's driver does not limit what comes after the first encrypted one."""
    for answers in range(40):
        with proxy_for(ALIAS) as proxy:
            proxy.answers = answers
            began = time.monotonic()
            try:
                session = session_through(proxy, monkeypatch, connection_timeout=2, query_timeout=5)
            except (DatabaseError, BackendError):
                assert time.monotonic() - began < 15, answers
            else:
                proxy.resume()
                session.end("done")
                break
    assert 2 < answers < 39


def test_what_runs_on_the_callers_connection_lets_it_count_afterwards():
    def counts() -> int:
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("DELETE FROM sqlsem_waiter WHERE 1 = 0")
            return cursor.rowcount

    with semaphore("counts", using=ALIAS) as permit:
        for act in (
            lambda: list(sqlserver.database_messages(ALIAS)),
            permit.fence,
            lambda: transaction_lock("others", using=ALIAS),
        ):
            with transaction.atomic(using=ALIAS):
                act()
                assert counts() == 0
            assert counts() == 0


def test_who_is_served_twice_at_the_same_moment_keeps_what_it_knows_of(monkeypatch):
    """A slot that came too late for one thread goes to the next one, which the keeper has just served elsewhere."""
    made = known("twice", slots=2)
    held = [detached(made) for _ in range(2)]
    backend: Any = get_backend(ALIAS)
    passed: list[Any] = []
    attempt, pass_on = Claims.attempt, Claims.pass_on

    def attempt_late(self: Any, session: LockSession, asked: Request, timeout: Any, **options: Any) -> Answer:
        if timeout != 0 and not passed:
            line = backend._lines[asked.line]
            wait_until(lambda: line.wanted and not line.waits_for(asked.permit_id), timeout=60)
            while held:
                run_beside(held.pop().release).result(60)  # a thread of the library leaves that to the keeper
        return attempt(self, session, asked, timeout, **options)

    def pass_on_late(self: Any, session: LockSession, asked: Request, successor: Request) -> Any:
        line = backend._lines[successor.line]
        elsewhere = self.try_claim(successor, fair=0).granted
        assert elsewhere is not None
        backend.claims.deliver(elsewhere, boot_now(), successor.resource)
        line.leave(successor.permit_id)
        passed.append(pass_on(self, session, asked, successor))
        return passed[-1]

    keep_from_looking(monkeypatch)  # what the keeper does at its heartbeats, ``pass_on_late`` does
    monkeypatch.setattr(Claims, "attempt", attempt_late)
    monkeypatch.setattr(Claims, "pass_on", pass_on_late)

    def wait(number: int) -> Any:
        if number == 0:
            with pytest.raises(AcquireTimeoutError):
                made.acquire(timeout=2)
            return None
        wait_until(lambda: backend._lines, timeout=60)
        return detached(made)

    _, permit = run_in_threads(2, wait, timeout=120)
    wait_until(lambda: passed == [None], timeout=60)
    with contextlib.closing(Session()) as observer:
        wait_until(lambda: slot_is_free(observer, "twice", 3 - permit.slot))
        assert not slot_is_free(observer, "twice", permit.slot)
        assert permit.lost is None
        permit.release()
        assert permit.lost is None
        assert slot_is_free(observer, "twice", permit.slot)


def test_a_slot_for_nobody_is_free_again_while_another_session_is_busy(monkeypatch):
    """It came after its thread had given up, and of another claim of the name it is not known what it has got."""
    made = known("nobody", slots=1)
    held = [detached(made)]
    backend: Any = get_backend(ALIAS)
    granted: list[Answer] = []
    busy: list[LockSession] = []
    attempt = Claims.attempt

    def attempt_late(self: Any, session: LockSession, asked: Request, timeout: Any, **options: Any) -> Answer:
        if timeout == 0 or granted:
            return attempt(self, session, asked, timeout, **options)
        line = backend._lines[asked.line]
        wait_until(lambda: not line.wanted, timeout=60)
        run_beside(held.pop().release).result(60)
        with backend.pool.shared(asked.resource.key) as other:
            pass
        other.lock.acquire(for_good=True)
        other.unclear[asked.resource.key] = (lock_names("nobody"), 1, True)
        busy.append(other)
        granted.append(attempt(self, session, asked, timeout, **options))
        return granted[0]

    monkeypatch.setattr(Line, "_give_up", lambda line: None)  # else its session is cut after a while
    keep_from_looking(monkeypatch)
    monkeypatch.setattr(Claims, "attempt", attempt_late)
    try:
        with pytest.raises(AcquireTimeoutError):
            made.acquire(timeout=2)
        wait_until(lambda: granted, timeout=60)
        assert granted[0].granted is not None
        with contextlib.closing(Session()) as observer:
            wait_until(lambda: slot_is_free(observer, "nobody", 1), timeout=20)
    finally:
        for each in busy:
            each.unclear.clear()
            each.lock.release()


def test_an_upgrade_that_two_threads_of_the_library_ask_for_at_once_stays(monkeypatch):
    """The keeper's look gets it while the line has just begun to ask."""
    lock = rwlock("both ask", readers=2, using=ALIAS)
    with lock.read():  # with its rows, and a session
        pass
    [reader] = run_in_threads(1, lambda _nth: detached(lock.read()))
    backend: Any = get_backend(ALIAS)
    real = Upgrades.ask
    answers: list[Answer] = []

    def asked_twice(self: Any, claim: Request, timeout: int = 0, *, close: bool = False, **options: Any) -> Answer:
        if not close or answers:
            return real(self, claim, timeout, close=close, **options)
        run_beside(reader.release).result(60)
        answers.append(real(self, claim, timeout, close=close))
        granted = answers[0].granted
        assert granted is not None
        backend.claims.deliver(granted, boot_now(), claim.resource)
        backend._lines[claim.line].leave(granted.permit_id)
        answers.append(real(self, claim, timeout, close=close))
        return answers[1]

    keep_from_looking(monkeypatch)
    monkeypatch.setattr(Upgrades, "ask", asked_twice)
    with lock.upgradable() as permit:
        permit.upgrade(60)
        wait_until(lambda: len(answers) == 2 and not backend._lines, timeout=60)
        assert answers[1].granted is None
        assert permit.lost is None
        assert run_in_threads(1, lambda _nth: lock.read().try_acquire()) == [None]
