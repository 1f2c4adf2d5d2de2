"""Several aliases: routers and replicas, two ways to one database, and an alias without autocommit."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.urls import reverse

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    BackendError,
    PermitLostError,
    control,
    lifecycle,
    queries,
    semaphore,
)
from django_sqlsem.claims import claim
from django_sqlsem.core.names import key_of
from django_sqlsem.locks import (
    counter,
    fenced,
    monitor,
    rwlock,
    transaction_lock,
)
from django_sqlsem.runtime import callers
from tests.support.databases import OutsideCounter, covered, held_rows, query, raw_connection
from tests.support.pgbouncer import pgbouncer
from tests.support.private_servers import ALIAS, free_port, known, private_server
from tests.support.threads import run_beside, run_in_threads, wait_until
from tests.testapp.models import Job, Probe, Stage
from tests.unit.test_admin import key, login

#: Nobody listens there: whatever is read from it fails.
REPLICA = {"ENGINE": "django.db.backends.postgresql", "NAME": "replica", "HOST": "127.0.0.1", "USER": "nobody"}


@pytest.fixture
def postgres(committed: None) -> str:
    if "postgres" not in covered():
        pytest.skip("no PostgreSQL")
    return "postgres"


class Split:
    """Locks are written to one alias, and everything about them would be read from a replica that is not there."""

    primary = ""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "replica" if model._meta.app_label in ("sqlsem", "testapp") else None

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self.primary if model._meta.app_label in ("sqlsem", "testapp") else None


@pytest.fixture
def split(database: str, monkeypatch: Any) -> Iterator[str]:
    monkeypatch.setattr(Split, "primary", database)
    with known("replica", REPLICA | {"PORT": str(free_port())}), override_settings(DATABASE_ROUTERS=[Split()]):
        yield database


def run(*words: str) -> str:
    out = io.StringIO()
    call_command("locks", *words, stdout=out)
    return out.getvalue()


@pytest.mark.one_server("fences")
def test_nothing_about_locks_is_read_from_a_replica(split: str) -> None:
    """Everything that has to do with them goes to where the router writes them; the replica is not even there."""
    lock = semaphore("routed", slots=2)
    operator = login("boss", is_superuser=True)
    with lock as permit:
        assert [row.semaphore_id for row in held_rows(split)] == [key("routed")]
        assert lock.status().held == 1
        assert [holder.name for holder in queries.holders()] == ["routed"]
        with transaction.atomic(using=split):
            permit.fence()
            Probe.objects.using(split).filter(fenced(permit)).update(entered=0)
        with transaction.atomic(using=split):
            transaction_lock("routed too", using=split)
        control.request_stop("routed", by="test")
        assert "routed" in run("list")
        assert "routed" in run("show", "routed")
        for name in ("semaphorerow", "slotrow", "claimrow", "refreshrow", "transactionlockrow"):
            assert operator.get(reverse(f"admin:sqlsem_{name}_changelist")).status_code == 200, name
        assert operator.get(reverse("admin:sqlsem_semaphorerow_change", args=[key("routed")])).status_code == 200
    with rwlock("readers").read():
        pass
    counter("counter").release(2)
    counter("counter").acquire()
    Job.objects.create()
    with claim(Job.objects.all(), Stage.WAITING, Stage.RUNNING, Stage.DONE, "stage") as rows:
        assert len(rows) == 1
    control.set_slots("routed", 5, by="test")
    assert lock.status().slots == 5
    assert run("purge", "--no-input")
    assert not held_rows(split)


def test_a_router_that_writes_to_a_replica_is_told_so(postgres: str) -> None:
    with private_server("postgres") as server:
        semaphore("writable", using=ALIAS).acquire().release()
        server.query("ALTER DATABASE sqlsem SET default_transaction_read_only = on")
        lifecycle.stop_all()
        with pytest.raises(BackendError, match=r"read-only.*kept by the primary"):
            semaphore("writable", using=ALIAS).acquire(timeout=0)
        server.query("ALTER DATABASE sqlsem RESET default_transaction_read_only", database="")
        with semaphore("writable", using=ALIAS) as permit:  # at once, on a new connection
            permit.check()


def test_two_aliases_of_one_database_have_one_semaphore(database: str) -> None:
    """Threads that come by either never meet inside; one that would wait for itself is told who has the slot."""
    if connections[database].vendor == "microsoft":
        pytest.skip("a question of rows")
    settings = dict(connections[database].settings_dict)
    with known("other", settings), OutsideCounter(database) as counter:

        def work(index: int) -> None:
            for _ in range(5):
                lock = semaphore("one", timeout=60, using=(database, "other")[index % 2])
                with lock as permit, counter.inside():
                    permit.check()
            connections[database].close()
            connections["other"].close()

        run_in_threads(4, work, timeout=120)
        assert (counter.entered, counter.peak) == (20, 1)
        with semaphore("one", using=database), pytest.raises(AlreadyHeldError, match="in this very thread"):
            semaphore("one", using="other").acquire(timeout=0.1)
        with monitor("two", using=database), monitor("two", using="other"):
            assert len(held_rows(database)) == 1
    # Its tables may be others by then.
    with (
        known("other", settings | {"OPTIONS": {**settings["OPTIONS"], "options": "-c search_path=mine"}}),
        semaphore("one", using=database),
    ):
        assert not callers.taken_by(threading.current_thread(), "other", key_of("one"))


def test_a_waiter_by_another_alias_of_the_database_is_served_in_its_turn(database: str) -> None:
    """Its own process hands the slot to it, and does not take that grant for nobody's: another would be let in."""
    served: list[str] = []
    with known("other", dict(connections[database].settings_dict)), OutsideCounter(database) as counter:
        lock = semaphore("turns", using=database)

        def wait(alias: str) -> None:
            with semaphore("turns", timeout=60, using=alias) as permit, counter.inside():
                served.append(alias)
                permit.check()
                # A process rejoins the end of the line for each grant: so whoever comes third has done so.
                wait_until(lambda: lock.status().waiting == 4 - len(served))
            connections.close_all()

        with lock:
            waits = []
            for alias in ("other", database, "other", database):
                waits.append(run_beside(partial(wait, alias)))
                wait_until(lambda: lock.status().waiting == len(waits))
        for each in waits:
            each.result(60)
        assert served == ["other", database, "other", database]
        assert (counter.entered, counter.peak) == (4, 1)


def test_waiters_by_another_alias_of_the_database_count(database: str) -> None:
    with known("other", dict(connections[database].settings_dict)):
        lock = semaphore("bounded", timeout=60, max_waiting=1, using=database)
        permit = lock.acquire()
        permit.detach()
        waits = run_beside(lambda: semaphore("bounded", timeout=60, using="other").acquire().release())
        wait_until(lambda: lock.status().waiting == 1)
        with pytest.raises(AcquireTimeoutError) as caught:
            lock.acquire()
        assert (caught.value.reason, caught.value.waiting) == ("queue full", 1)
        permit.release()
        waits.result(60)


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_transaction_behind_a_pooler_is_fenced_with_a_lock_that_was_taken_past_it(postgres: str, mode: str) -> None:
    """The set-up that the documentation recommends: two addresses, one database."""
    query(postgres, "INSERT INTO testapp_probe (name, inside, peak, entered) VALUES ('data', 0, 0, 0)")
    with pgbouncer(postgres, pool_mode=mode) as pooler, known("pooled", pooler.settings):
        rows = Probe.objects.using("pooled").filter(name="data")
        permit = semaphore("fenced", using=postgres).acquire()
        with transaction.atomic(using="pooled"):
            permit.fence(using="pooled")
            rows.update(entered=1)
        assert rows.filter(fenced(permit)).update(entered=2) == 1
        control.revoke(permit.name, permit.slot, permit.token, by="operator", using=postgres)

        def write() -> None:
            with transaction.atomic(using="pooled"):
                rows.update(entered=3)
                permit.fence(using="pooled")

        with pytest.raises(PermitLostError):
            write()
        assert rows.get().entered == 2
        permit.release()


def test_a_copy_of_the_database_is_another_one(postgres: str) -> None:
    """A server with the same rows, as a replica or a restored backup has, cannot be fenced with the permit."""
    with private_server("postgres") as server:
        permit = semaphore("copied", using=postgres).acquire()
        server.query("DELETE FROM sqlsem_slot")
        with contextlib.closing(raw_connection(postgres)) as here, contextlib.closing(raw_connection(ALIAS)) as there:
            for table in ("sqlsem_semaphore", "sqlsem_slot"):
                with here.cursor().copy(f"COPY {table} TO STDOUT") as rows:
                    copied = b"".join(rows)
                with there.cursor().copy(f"COPY {table} FROM STDIN") as target:
                    target.write(copied)
        with transaction.atomic(using=ALIAS), pytest.raises(ValueError, match="another database"):
            permit.fence(using=ALIAS)
        permit.release()


def test_mariadb_in_the_mode_of_oracle(committed: None) -> None:
    """In which ``BEGIN`` is a block. Django works there."""
    if "mariadb" not in covered():
        pytest.skip("no MariaDB")
    settings = dict(connections["mariadb"].settings_dict)
    options = {**settings["OPTIONS"], "init_command": "SET sql_mode = 'ORACLE'"}
    with known("oracle", settings | {"OPTIONS": options}):
        lock, shared = semaphore("pairs", slots=3, take=2, using="oracle"), rwlock("shared", using="oracle")
        with lock as permit:
            permit.check()
            waits = run_beside(lambda: lock.acquire(timeout=60).release())
            wait_until(lambda: lock.status().waiting == 1)
        waits.result(60)
        with shared.upgradable() as reader:
            reader.upgrade()
        counter("counted", 2, using="oracle").acquire()
        with transaction.atomic(using="oracle"), lock as permit:
            permit.fence()
        assert control.set_slots("pairs", 5, by="test", using="oracle")
        assert not held_rows("mariadb")


def test_without_autocommit_locks_work_and_operators_acts_are_refused(postgres: str) -> None:
    with known("manual", connections[postgres].settings_dict | {"AUTOCOMMIT": False}):
        with semaphore("manual", slots=2, using="manual"):
            assert len(held_rows(postgres)) == 1
        assert not held_rows(postgres)
        with pytest.raises(TransactionManagementError):
            control.set_slots("manual", 5, by="test", using="manual")
        connections["manual"].rollback()
        assert semaphore("manual", using=postgres).status().slots == 2
