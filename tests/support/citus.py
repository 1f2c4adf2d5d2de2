"""A test database on a Citus cluster: the alias ``citus``, whose lock tables are distributed.

``SQLSEM_TEST_CITUS_URL`` leads to a database of the coordinator that knows its workers. Each test database is made on
all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from django.db import connections

from django_sqlsem import conf
from django_sqlsem.database import dialects
from tests.support import servers
from tests.support.databases import ROOT

ALIAS = "citus"
#: Why a test does not apply to Citus, by the word that its marker gives: ``@pytest.mark.one_server(why)``.
ONE_SERVER = {
    "beacons": "a server of the cluster does not see the sessions of the others",
    "fences": "the servers of the cluster commit one after the other",
    "own statements": "Citus refuses the test's own statements: triggers, and locks of rows of several names",
    "portable": "Citus has statements of its own, and the portable ones need not fit it",
}
#: The page whose script distributes the tables.
PAGE = ROOT / "docs/citus.md"
#: The coordinator and the workers, as a database that is part of a cluster knows them.
NODES = "SELECT nodename, nodeport, groupid FROM pg_dist_node ORDER BY groupid"


def left_out(node: Any) -> str:
    """Return why a test does not apply to Citus; empty if it does."""
    markers = [node.get_closest_marker("one_server"), node.get_closest_marker("rows_only")]
    whys = [marker.args[0] for marker in markers if marker is not None]
    return next((ONE_SERVER[why] for why in whys if why in ONE_SERVER), "")


def know() -> None:
    """Have the library know what the alias is, whatever a test says in ``SQLSEM``."""

    def config(alias: str | None = None) -> conf.Config:
        found = conf.config(alias)
        return dataclasses.replace(found, citus=True) if _is_there(alias) else found

    dialects.config = config


def _is_there(alias: str | None) -> bool:
    """Whether an alias is the cluster's database, by whatever name."""
    if ALIAS not in connections.databases or alias not in connections.databases:
        return False
    ours, its = connections.databases[ALIAS], connections.databases[alias]
    return all(ours.get(each) == its.get(each) for each in ("HOST", "PORT", "NAME"))


@contextlib.contextmanager
def joined(alias: str) -> Iterator[None]:
    """Make the database of an alias, which is there, part of a cluster, with a database of its name on each worker."""
    name = connections[alias].settings_dict["NAME"]
    nodes = query(NODES)
    workers = [{"host": host, "port": port} for host, port, group in nodes if group]
    for worker in workers:
        query(f'CREATE DATABASE "{name}"', **worker)
        query("CREATE EXTENSION citus", **worker, dbname=name)
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE EXTENSION citus")
            for host, port, group in nodes:
                cursor.execute(
                    f"SELECT {'citus_add_node' if group else 'citus_set_coordinator_host'}(%s, %s)", [host, port]
                )
        yield
    finally:
        for worker in workers:
            query(f'DROP DATABASE "{name}" WITH (FORCE)', **worker)


def distribute(alias: str) -> None:
    """Distribute the lock tables, as the page says."""
    with connections[alias].cursor() as cursor:
        cursor.execute(PAGE.read_text(encoding="utf-8").partition("```postgresql\n")[2].partition("```")[0])


def query(sql: str, **elsewhere: Any) -> list[Any]:
    """Run a statement where the variable leads, or ``elsewhere``, and return its rows."""
    import psycopg

    with psycopg.connect(servers.url_of(ALIAS), autocommit=True, **elsewhere) as connection:
        cursor = connection.execute(sql)
        return cursor.fetchall() if cursor.description else []
