"""``kill -9`` of a web server: what it held looks dead to everybody at once, and is cleared up by whoever lives."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import pytest
from django.contrib.auth.models import User
from django.db.models import F
from django.test import Client
from django.urls import reverse

from django_sqlsem import queries, semaphore
from django_sqlsem.history import events
from django_sqlsem.models import WaiterRow
from django_sqlsem.snapshots import SlotState
from tests.places.site import Site, wait_for_waiters
from tests.support.databases import covered, held_rows, label
from tests.support.operators import locks_command
from tests.support.processes import Child
from tests.support.threads import run_beside, wait_until
from tests.unit.test_admin import SEMAPHORES, key, text

#: A look that begins within so many seconds of the kill tells it, with nobody waiting.
TOLD = 3.0
#: So much longer a killed waiter's place is made to last, in microseconds: only that it is dead can end it in time.
AN_HOUR = 3_600_000_000
#: How long a step may take on a busy machine.
SOON = 60.0


@pytest.fixture(
    params=[pytest.param(each, id=label(each)) for each in covered() if label(each) in ("sqlite", "postgres")]
)
def alias(request, committed, settings):
    settings.SQLSEM = {"DATABASE": request.param}
    return request.param


@pytest.fixture
def dying(alias):
    """A small site whose view has a slot of ``one``: whoever asks for ``holds`` has it until the site is killed."""
    with Site("sync", alias, "-w", "1") as site:
        yield site


def kill(site):
    """End a server and its workers at once. Return when that was."""
    os.killpg(site.process.pid, signal.SIGKILL)
    site.process.wait(SOON)
    return time.monotonic()


def command(*arguments):
    done = subprocess.run(
        **locks_command(*arguments), capture_output=True, text=True, timeout=SOON, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def page(name, *arguments):
    """Return what an operator sees of a page of the admin."""
    client = Client()
    client.force_login(User.objects.get(username="boss"))
    return text(client.get(reverse(name, args=arguments)))


LOOKS = {
    "locks list": lambda: re.search(r"^one .* stale ", command("list"), re.MULTILINE),
    "locks list, JSON": lambda: json.loads(command("list", "--format", "json"))[0]["holders"][0]["state"] == "stale",
    "locks show": lambda: "one slot 1 (stale)" in command("show", "one"),
    "status()": lambda: semaphore("one").status().holders[0].state is SlotState.STALE,
    "overview": lambda: "1 stale" in page(SEMAPHORES),
    "page of the lock": lambda: "1 slot is stale" in page("admin:sqlsem_semaphorerow_change", key("one")),
}


def began(look):
    """Look again and again until it tells. Return when the look began that did."""
    start = time.monotonic()
    while not look():
        assert time.monotonic() - start < SOON
        start = time.monotonic()
    return start


def test_a_killed_holder_is_stale_within_three_seconds_and_any_living_process_frees_it(alias, dying):
    User.objects.create_superuser("boss")
    with dying.call("/one?id=holds"):
        dying.marks.wait("in-holds")
        wait_until(lambda: [row for row in held_rows(alias) if row.beacon])
        (before,) = held_rows(alias)
        assert semaphore("one").status().holders[0].state is SlotState.HELD
        killed = kill(dying)
    looks = {name: run_beside(lambda look=look: began(look)) for name, look in LOOKS.items()}
    late = {name: look.result(2 * SOON) - killed for name, look in looks.items()}
    assert max(late.values()) < TOLD, late
    assert [row.suspect_us for row in held_rows(alias)] == [None]  # nobody has wanted the slot meanwhile

    proved = (before.expires_us - before.lease_us - before.acquired_us) / 1e6
    with Child("hold", alias, "another") as living:
        living.expect("held")
        (lost,) = wait_until(lambda: queries.events("one", what=[events.LOST]), timeout=SOON, what="the loss")
        assert (lost.slot, lost.token, lost.pid) == (before.slot, before.token, before.pid)
        assert lost.held == pytest.approx(proved, abs=0.01)
        total = wait_until(lambda: queries.totals(["one"], window=3600).get("one"), timeout=SOON, what="the statistics")
        assert (total.lost, total.released) == (1, 0)
        assert [row.semaphore.name for row in held_rows(alias)] == ["another"]
        assert command("list", "--stale").startswith("Nothing is stale")
        assert "0 stale" in page(SEMAPHORES)
        living.send()
        living.finish()


def test_a_killed_waiter_is_gone_for_a_view_that_does_not_wait(alias, dying):
    holder = semaphore("one").acquire()
    with Site("sync", alias, "-w", "1") as other, dying.call("/patient?id=waits"):
        wait_for_waiters(alias, "one", 1)
        assert other.get("/at-once?id=early&go=1").status == 503
        kill(dying)
        waiters = WaiterRow.objects.using(alias)
        assert waiters.update(expires_us=F("expires_us") + AN_HOUR) == 1
        holder.release()
        wait_until(lambda: other.get("/at-once?id=late&go=1").status == 200, timeout=SOON)
        assert not waiters.exists()
