"""A view with a lock for each user: hundreds of names are one line, and those out of use are forgotten."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from django.contrib.auth.models import User
from django.db.models import F
from django.test import Client
from django.urls import reverse

from django_sqlsem import control, queries
from django_sqlsem.models import EventRow, MinuteRow, SemaphoreRow, SlotRow
from tests.e2e.test_killed_processes import SOON, command, page
from tests.places.site import Site
from tests.support.databases import covered, label
from tests.support.processes import Child
from tests.support.threads import run_beside, run_in_threads, wait_until
from tests.unit.test_admin import SEMAPHORES, text

USERS = 200
CLIENTS = 4
#: Who holds a slot as somebody looks, and who is turned away from two that are held.
HOLDS = ("0", "0", "1")
REFUSED = 17
TEMPLATE = "sync:{user}"
#: The shortest time after which names are forgotten, in seconds; and one that is longer, in microseconds.
FORGET_AFTER = 60
AN_HOUR = 3_600_000_000
#: A process that uses another name for as long as it lives. It looks for idle names without the pauses of others.
LIVING = """
from django_sqlsem import semaphore
from django_sqlsem.runtime import chores
chores.FORGET_EVERY = chores.TIDY_EVERY = chores.TIDY_SHARE = 1
with semaphore("alive", using=args[0]):
    say("lives")
    listen()
"""


@pytest.fixture(
    params=[pytest.param(each, id=label(each)) for each in covered() if label(each) in ("sqlite", "postgres")]
)
def alias(request, committed, settings):
    settings.SQLSEM = {"DATABASE": request.param, "FORGET_AFTER": FORGET_AFTER}
    return request.param


@pytest.fixture
def site(alias):
    with Site("gthread", alias, "-w", "1", urls="tests.places.sync", sqlsem={"FORGET_AFTER": FORGET_AFTER}) as site:
        yield site


def group():
    """Return what is told of the names of the template, once all is written that has happened."""
    found = {each.template: each for each in queries.templates()}
    return found.get(TEMPLATE)


def an_hour_passes(alias):
    """Let all that has happened be an hour ago. Nobody holds or waits."""
    SemaphoreRow.objects.using(alias).update(declared_us=F("declared_us") - AN_HOUR)
    SlotRow.objects.using(alias).filter(token__gt=0).update(token=F("token") - AN_HOUR)
    MinuteRow.objects.using(alias).update(minute_us=F("minute_us") - AN_HOUR)
    EventRow.objects.using(alias).update(at_us=F("at_us") - AN_HOUR)


def known(alias):
    return set(SemaphoreRow.objects.using(alias).values_list("name", flat=True))


def test_hundreds_of_users_are_one_line_that_opens_and_whoever_is_idle_is_forgotten(alias, site):
    User.objects.create_superuser("boss")

    def visit(number):
        for user in range(number, USERS, CLIENTS):
            assert site.get(f"/sync/{user}").status == 200

    run_in_threads(CLIENTS, visit, timeout=SOON)
    with contextlib.ExitStack() as calls:
        holders = [calls.enter_context(site.call(f"/sync/{user}?id={nth}")) for nth, user in enumerate(HOLDS)]
        for nth, _ in enumerate(HOLDS):
            site.marks.wait(f"in-{nth}")
        assert [site.get("/sync/0").status for _ in range(REFUSED)] == [503] * REFUSED
        wait_until(lambda: group().turned_away == REFUSED, timeout=SOON, what="all is written down")
        asked = [[], ["--format", "json"], ["--template", TEMPLATE]]
        listed = [run_beside(lambda options=options: command("list", *options)) for options in asked]
        _shown_as_one_line(*(each.result(SOON) for each in listed[:2]))
        _opened(listed[2].result(SOON))
        for nth, holder in enumerate(holders):
            site.marks.set(f"go-{nth}")
            assert holder.answer().status == 200
    _forgotten(alias, site)


def _shown_as_one_line(listed, as_json):
    """The command and the overview show the template once, and none of its names."""
    (told,) = [line.split() for line in listed.splitlines() if line.startswith(TEMPLATE)]
    assert told[:5] == [TEMPLATE, str(USERS), str(len(HOLDS)), "-", str(REFUSED)], listed  # and nobody waits
    assert "sync:1" not in listed
    (told,) = json.loads(as_json)
    assert (told["template"], told["names"], told["held"], told["turned_away"]) == (
        TEMPLATE,
        USERS,
        len(HOLDS),
        REFUSED,
    )
    seen = page(SEMAPHORES)
    assert TEMPLATE in seen
    assert f"{USERS} names" in seen
    assert "sync:1" not in seen


def _opened(listed):
    """Who asks for the names of the template gets them one by one."""
    assert len(re.findall(r"^sync:\d+ ", listed, re.MULTILINE)) == USERS - 2 + len(HOLDS)  # a line for each holder
    client = Client()
    client.force_login(User.objects.get(username="boss"))
    seen = text(client.get(reverse(SEMAPHORES), {"template": TEMPLATE}))
    assert "sync:0 " in seen
    assert "sync:1 " in seen


def _forgotten(alias, site):
    """After an hour a living process forgets them all, but for those that an operator has paused or set."""
    control.pause("sync:3", by="ann")
    control.set_slots("sync:4", 5, by="ann")
    released = USERS + len(HOLDS)
    wait_until(lambda: _released(alias) == released, timeout=SOON, what="all is written down")
    site.stop()
    an_hour_passes(alias)
    with Child(LIVING, alias) as living:
        living.expect("lives")
        wait_until(lambda: known(alias) == {"sync:3", "sync:4", "alive"}, timeout=SOON, what=str(len(known(alias))))
        living.send()
        living.finish()
    assert group().names == 2
    assert set(SlotRow.objects.using(alias).values_list("semaphore__name", flat=True)) == {"sync:3", "sync:4", "alive"}


def _released(alias):
    return sum(MinuteRow.objects.using(alias).values_list("released", flat=True))
