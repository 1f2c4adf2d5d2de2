"""A Citus cluster: each name on one of several servers, and the way there for a site that is running."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from django.db import connections, transaction

from django_sqlsem import SemaphoreError, mutex, semaphore
from django_sqlsem.core.names import key_of
from django_sqlsem.database import bells
from django_sqlsem.database.dialects import Citus, PostgreSQL
from django_sqlsem.locks import fenced
from django_sqlsem.models import WaiterRow
from tests.golden import statements
from tests.programs.outage_clients import Sufferer
from tests.support import citus, databases, servers
from tests.support.databases import query
from tests.support.private_servers import ALIAS, known, migrate
from tests.support.threads import wait_until
from tests.testapp.models import Probe

NAMES = [f"name {number}" for number in range(8)]
#: Housekeeping, and the look after a server's new life, go through all names; the others have no table, or are never
#: sent there.
OF_ALL_NAMES = {"beacons.TAKEN", "beacons.HELD_BY", "taken", "fences.LOOK", "fences.EXTEND", "handoff.NOTIFY"}
GIVEN = {"now": 1795695312087864, "row_ids": [1], "permit_ids": ["1"]}


@pytest.fixture
def cluster(committed):
    """The alias of the cluster. Skips without one."""
    if citus.ALIAS not in databases.covered():
        pytest.skip("no Citus: SQLSEM_TEST_CITUS_URL names none")
    return citus.ALIAS


@pytest.fixture
def site(cluster):
    """A database of the cluster that is not distributed yet, as ``ALIAS``: the environment of its processes."""
    settings = connections[cluster].settings_dict
    settings = {each: settings[each] for each in ("ENGINE", "USER", "PASSWORD", "HOST", "PORT")}
    settings |= {"NAME": f"sqlsem_site_{servers.RUN}", "OPTIONS": {}}
    with connections[cluster].cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {settings['NAME']}")
    try:
        migrate(settings)
        with known(ALIAS, settings), citus.joined(ALIAS):
            there = json.loads(databases.child_environment()["SQLSEM_TEST_DATABASES"]) | {ALIAS: settings}
            yield {"SQLSEM_TEST_DATABASES": json.dumps(there)}
    finally:
        with connections[cluster].cursor() as cursor:
            cursor.execute(f"DROP DATABASE {settings['NAME']} WITH (FORCE)")


def planned(cursor, text):
    """Return the plan of a statement, whatever its parameters are."""
    for word, there in {"{rows}": "1", "{ids}": "1", "{permits}": "'x'"}.items():
        text = text.replace(word, there)
    # As text a value may be of any type.
    values = dict.fromkeys(re.findall(r"%\((\w+)\)s", text), "1")
    values |= {name: given for name, given in GIVEN.items() if name in values}
    cursor.execute(f"EXPLAIN {text}", values)
    return "\n".join(row[0] for row in cursor.fetchall())


@pytest.mark.parametrize("name", sorted(set(statements.row_texts("citus")) - OF_ALL_NAMES))
def test_a_statement_goes_to_one_server(cluster, name):
    with connections[cluster].cursor() as cursor:
        plan = planned(cursor, statements.row_texts("citus")[name])
    assert re.findall(r"Task Count: (\d+)", plan) == ["1"], plan


def test_names_lie_on_several_servers(cluster):
    for name in NAMES:
        with semaphore(name, using=cluster):
            pass
    keys = [key_of(name) for name in NAMES]
    place = "SELECT nodeport FROM pg_dist_shard_placement WHERE shardid ="
    place += " get_shard_id_for_distribution_column('sqlsem_semaphore', %s::text)"
    assert len({query(cluster, place, (key,))[0][0] for key in keys}) > 1


def test_whoever_holds_many_names_renews_them_all(cluster):
    permits = [mutex(name, lease=1.5, using=cluster).acquire() for name in NAMES]
    expires = "SELECT MIN(expires_us) FROM sqlsem_slot"
    first = query(cluster, expires)[0][0]
    wait_until(lambda: query(cluster, expires)[0][0] > first + 3_000_000, timeout=30, what="they have been renewed")
    for permit in permits:
        permit.check()
        permit.release()


def test_the_coordinator_tells_a_waiter_on_another_host(cluster, monkeypatch):
    monkeypatch.setattr(bells, "ring", lambda channel, note: False)
    permit = semaphore("told", using=cluster).acquire()
    with Sufferer(cluster, "told") as waiter, contextlib.closing(databases.raw_connection(cluster)) as listener:
        waiter.send("acquire 60")
        row = wait_until(lambda: WaiterRow.objects.using(cluster).first(), what="it waits")
        listener.execute(f'LISTEN "{row.channel}"')
        permit.release()
        told = next(listener.notifies(timeout=20))
        assert told.payload.split()[0] == row.ticket
        waiter.answer("held")
        waiter.does("release", "released")


def test_a_transaction_is_not_fenced(cluster):
    with mutex("unfenced", using=cluster) as permit, transaction.atomic(using=cluster):
        with pytest.raises(SemaphoreError, match="Citus"):
            permit.fence(using=cluster)
        with pytest.raises(SemaphoreError, match="Citus"):
            Probe.objects.using(cluster).filter(fenced(permit)).update(inside=1)


def test_the_clock_is_the_coordinators(cluster):
    with connections[cluster].cursor() as cursor:
        cursor.execute(f"SELECT {PostgreSQL.moment_sql}")
        before = cursor.fetchone()[0]
        told = [Citus().now(cursor) for _ in range(2)]
        cursor.execute(f"SELECT {PostgreSQL.moment_sql}")
        after = cursor.fetchone()[0]
    assert before - 100_000 <= told[0] <= told[1] <= after, "it is never ahead"


TOLD = {"SQLSEM_TEST_SETTINGS": json.dumps({"DATABASES": {ALIAS: {"CITUS": True}}})}


def test_the_tables_of_a_running_site_are_distributed(site):
    """Holders and waiters go on, and get what they are to get; with and without the setting before that."""
    expires = "SELECT SUM(expires_us) FROM sqlsem_slot"
    with (
        Sufferer(ALIAS, "running", env=site, lease=2) as before,
        Sufferer(ALIAS, "running", env=site | TOLD, lease=2) as holder,
        Sufferer(ALIAS, "running", env=site | TOLD, lease=2) as waiter,
    ):
        before.does("acquire 5", "held")
        holder.send("acquire 60")
        wait_until(lambda: query(ALIAS, "SELECT 1 FROM sqlsem_waiter"), what="it waits")
        before.does("release", "released")
        assert json.loads(holder.expect())[0] == "held"
        waiter.send("acquire 60")
        wait_until(lambda: query(ALIAS, "SELECT 1 FROM sqlsem_waiter"), what="another one waits")
        citus.distribute(ALIAS)
        first = query(ALIAS, expires)[0][0]
        wait_until(lambda: query(ALIAS, expires)[0][0] > first + 2_000_000, timeout=30, what="the permit is renewed")
        holder.does("check", "ours")
        assert len(waiter.lines) == 1, "it waits on"
        holder.does("release", "released")
        assert json.loads(waiter.expect())[0] == "held"
        waiter.does("release", "released")
