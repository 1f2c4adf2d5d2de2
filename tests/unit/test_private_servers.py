"""The servers and the pooler that tests start by themselves."""

from __future__ import annotations

import contextlib

import pytest
from django.db import connections

from tests.support import databases, programs
from tests.support.pgbouncer import pgbouncer
from tests.support.private_servers import ALIAS, KINDS, children_of, private_server
from tests.support.processes import is_alive
from tests.support.threads import wait_until
from tests.testapp.models import Probe


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_server_comes_back_with_what_was_committed(committed, kind):
    with private_server(kind) as server:
        Probe.objects.using(ALIAS).create(name="before")
        connections[ALIAS].close()
        everything = [server.process.pid, *children_of(server.process.pid)]
        server.kill()
        assert not any(map(is_alive, everything))
        assert not server.answers()
        server.start()
        Probe.objects.using(ALIAS).create(name="after")
        assert sorted(Probe.objects.using(ALIAS).values_list("name", flat=True)) == ["after", "before"]
        connections[ALIAS].close()
        server.stop()
        assert not server.answers()
        server.start()
        assert server.query("SELECT COUNT(*) FROM testapp_probe") == [(2,)]
        directory = server.directory
    assert not directory.exists()
    assert ALIAS not in connections.databases


@pytest.mark.parametrize("kind", KINDS)
def test_every_server_starts_empty(committed, kind):
    for _ in range(2):
        with private_server(kind) as server:
            assert not Probe.objects.using(ALIAS).exists()
            Probe.objects.using(ALIAS).create(name="mine")
            assert server.settings["PORT"] == connections[ALIAS].settings_dict["PORT"]


def test_a_killed_server_forgets_what_was_not_flushed(committed):
    with private_server("postgres", wal_writer_delay="10s", autovacuum="off") as server:
        for _ in range(10):
            with contextlib.closing(connections[ALIAS]) as connection, connection.cursor() as cursor:
                cursor.execute("SET synchronous_commit = off")
                cursor.execute("INSERT INTO testapp_probe (name, inside, peak, entered) VALUES ('gone', 0, 0, 0)")
                server.kill()
            server.start()
            if not Probe.objects.using(ALIAS).exists():
                break
            Probe.objects.using(ALIAS).all().delete()
        else:
            pytest.fail("nothing was ever lost")


@pytest.mark.skipif("postgres" not in databases.covered(), reason="PostgreSQL is not covered")
@pytest.mark.parametrize(("mode", "sessions"), [("transaction", 1), ("session", 2)])
def test_pgbouncer_lends_sessions(committed, mode, sessions):
    with pgbouncer("postgres", pool_mode=mode, default_pool_size="2") as pooler:
        with pooler.connect() as one, pooler.connect() as two:
            found = {each.execute("SELECT pg_backend_pid()").fetchone()[0] for each in (one, two, one, two)}
            assert len(found) == sessions
            assert one.info.backend_pid not in found
        pid = pooler.process.pid
    wait_until(lambda: not is_alive(pid))


def test_a_program_that_is_not_there_skips_the_test(monkeypatch):
    from django.conf import settings

    monkeypatch.setitem(programs.PLACES, "no-such-server", ("/usr/lib/postgresql/*/bin",))
    monkeypatch.setattr(settings, "FOUND", {})
    with pytest.raises(pytest.skip.Exception, match="no-such-server is not installed"):
        programs.need("no-such-server")
