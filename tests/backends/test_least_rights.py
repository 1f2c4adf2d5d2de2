"""A role with the rights of docs/databases.md, and no other: everything works, and nothing else is within its reach."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import DatabaseError, connections, transaction

from django_sqlsem import control, lifecycle, mutex, queries, semaphore
from django_sqlsem.claims import claim
from django_sqlsem.locks import counter, locked_atomic, monitor, rwlock, table_lock, transaction_lock
from django_sqlsem.refresh import refresh_every
from tests.support.databases import raw_connection
from tests.support.few_rights import grants
from tests.support.private_servers import ALIAS, known, private_server
from tests.support.threads import run_beside, wait_until
from tests.testapp.models import Job, Stage

FEW = "few_rights"
#: What a site gives its role for tables of its own.
OWN = ("testapp_job",)


@pytest.fixture(params=["postgres", "mariadb"])
def role(request: Any, committed: None) -> Iterator[str]:
    """An alias that logs in as a role with the rights of the page."""
    kind = request.param
    with private_server(kind) as server:
        server.query("CREATE USER shop")
        for statement in grants(kind):
            server.query(statement.replace("shop.", "sqlsem."))
        for table in OWN:
            server.query(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO shop")
        with known(FEW, server.settings | {"USER": "shop"}):
            yield FEW


def test_the_page_names_every_table() -> None:
    tables = {model._meta.db_table for model in apps.get_app_config("sqlsem").get_models()}
    for kind in ("postgres", "mariadb"):
        text = "".join(grants(kind))
        assert {word.removeprefix("shop.").strip(",") for word in text.split() if "sqlsem_" in word} == tables


def test_every_lock_and_act_works_with_these_rights(role: str) -> None:
    lock = semaphore("few", slots=2, timeout=60, using=role)
    with lock as permit:
        assert permit.check() is None
        with transaction.atomic(using=role):
            permit.fence()
        with semaphore("several", slots=3, take=2, using=role), mutex("alone", using=role), monitor("m", using=role):
            assert queries.semaphore("several", using=role).held == 2  # type: ignore[union-attr]
        with rwlock("both", using=role).upgradable() as reader:
            reader.upgrade()
        counter("units", 2, using=role).acquire()
        counter("units", using=role).release()
    with transaction.atomic(using=role):
        transaction_lock("in the transaction", using=role)
        table_lock(Job, using=role)
    with locked_atomic("around it", using=role):
        pass
    Job.objects.using(role).create()
    with claim(Job.objects.using(role).all(), Stage.WAITING, Stage.RUNNING, Stage.DONE, "stage", using=role) as rows:
        assert len(rows) == 1
    assert refresh_every("seven", 60, lambda: 7, using=role)() == 7
    # A waiter is served, by a release, after a crash, and when an operator has made room.
    first = semaphore("line", using=role)
    held = first.acquire()
    held.detach()
    waits = run_beside(lambda: semaphore("line", timeout=60, using=role).acquire().release())
    wait_until(lambda: first.status().waiting == 1)
    assert control.set_slots("line", 2, by="test", using=role)
    waits.result(60)
    assert control.pause("line", by="test", using=role)
    assert control.resume("line", by="test", using=role)
    assert control.request_stop("line", by="test", using=role)
    assert control.revoke("line", held.slot, held.token, by="test", using=role)
    held.release()
    for words in (["list"], ["show", "line"], ["waits"], ["purge", "--idle", "--no-input"], ["doctor"]):
        out = io.StringIO()
        with contextlib.suppress(SystemExit):  # the doctor has something to say
            call_command("locks", *words, "--database", role, stdout=out)
        assert out.getvalue()
        assert "denied" not in out.getvalue()
    lifecycle.stop_all()  # what is recorded is written by then
    assert [event.what for event in queries.events("line", using=role)]
    with pytest.raises(DatabaseError), connections[role].cursor() as cursor:
        cursor.execute("CREATE TABLE more (id integer)")
    with pytest.raises(DatabaseError), connections[role].cursor() as cursor:
        cursor.execute("SELECT * FROM auth_user")


@pytest.mark.parametrize("role", ["postgres"], indirect=True)
def test_the_doctor_counts_the_sessions_of_other_roles(role: str) -> None:
    """Of which a role without pg_monitor sees little: it is the server that runs out of connections."""
    lifecycle.stop_all()
    with contextlib.ExitStack() as stack, connections[ALIAS].cursor() as cursor:
        for _ in range(5):
            stack.enter_context(contextlib.closing(raw_connection(ALIAS)))
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        there = cursor.fetchone()[0]
        out = io.StringIO()
        with contextlib.suppress(SystemExit):
            call_command("locks", "doctor", "--database", role, "--no-acquire", stdout=out)
    found = re.search(r"(\d+) of the server's \d+ connections", out.getvalue())
    assert found
    assert int(found[1]) >= there >= 6
