"""A permit that an operator revokes: its holder knows within one renewal interval, and disturbs nobody after."""

from __future__ import annotations

import getpass
import json
import subprocess
import time

from django_sqlsem import queries
from tests.programs.lock_clients import Actor
from tests.support import applocks
from tests.support.databases import held_rows
from tests.support.operators import locks_command
from tests.support.threads import wait_until

LEASE = 4
#: A renewal every quarter of the lease; the rest is what a busy machine takes, in seconds.
SOON = 20.0
#: Application locks are proved every 2 s whatever the lease.
SOON_BY_SESSION = 20.0


def soon(database):
    return max(SOON, SOON_BY_SESSION) if applocks.are_at(database) else SOON


def revoke(database, name, *arguments):
    if applocks.are_at(database):
        arguments += ("--kill",)
    command = locks_command("revoke", name, *arguments, "--noinput", "--database", database)
    done = subprocess.run(**command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_revoked_holder_learns_it_within_one_renewal_interval(database):
    with Actor(database, "revoked", lease=LEASE, announce=True) as holder, Actor(database, "revoked") as other:
        _, (old,) = holder.ready().acquire()
        other.ready()
        assert "Revoked 1 slot" in revoke(database, "revoked")
        ended = time.monotonic()
        thread, reason = json.loads(holder.expect("on_lost"))
        assert time.monotonic() - ended < soon(database)
        assert thread == "sqlsem-on-lost"
        assert reason == "revoked"
        reason, message = holder.check()
        assert reason == "revoked"
        assert f"revoked by {getpass.getuser()}@" in message

        slots, (token,) = other.acquire()
        assert slots == [1]
        assert token > old
        holder.release()
        (row,) = held_rows(database)
        assert (row.pid, row.token) == (other.pid, token)
        assert other.check() is None
        other.release()
        holder.end()
        other.end()


def test_a_waiter_gets_the_slot_at_once_and_the_late_release_spares_it(database):
    with Actor(database, "handed", lease=600) as holder, Actor(database, "handed") as waiter:
        _, (old,) = holder.ready().acquire()
        waiter.ready().ask_for()
        wait_until(lambda: queries.semaphore("handed", using=database).waiting == 1)
        revoke(database, "handed", "--slot", "1")
        _, (token,) = waiter.granted(timeout=20)
        assert token > old
        if not applocks.are_at(database):
            assert holder.check() is None, "with a lease of 600 s it cannot know yet"
        holder.release()  # in good faith
        (row,) = held_rows(database)
        assert (row.pid, row.token) == (waiter.pid, token)
        assert holder.ask("told") in ([], [["sqlsem-on-lost", "expired"]], [["sqlsem-on-lost", "revoked"]])
        waiter.release()
        holder.end()
        waiter.end()


def test_one_of_several_slots_revoked_is_the_whole_permit_lost_and_nobody_elses(database):
    options = {"slots": 3, "lease": LEASE, "announce": True}
    with Actor(database, "three", take=2, **options) as pair, Actor(database, "three", **options) as single:
        assert pair.ready().acquire()[0] == [1, 2]
        assert single.ready().acquire()[0] == [3]
        revoke(database, "three", "--slot", "2")
        pair.expect("on_lost", timeout=soon(database) + 1)
        assert pair.check()[0] == "revoked"
        assert single.check() is None
        pair.release()
        assert [row.slot for row in held_rows(database)] == [3]
        single.release()
        pair.end()
        single.end()
