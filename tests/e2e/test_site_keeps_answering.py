"""A busy lock never stalls a site: with default settings, a small one goes on answering what needs no lock."""

from __future__ import annotations

import threading
import time

import pytest

from django_sqlsem import control, queries, semaphore
from tests.places.site import Site
from tests.support.databases import covered, label
from tests.support.threads import wait_until

#: What an undecorated page may take, in seconds.
ANSWERS = 1.0
CLIENTS = 10
ROUNDS = 6


@pytest.fixture(params=[pytest.param(alias, id=label(alias)) for alias in covered()])
def site(request, committed):
    """The usual deployment of a small site: gunicorn with 2 workers, each of which serves one request at a time."""
    with Site("sync", request.param, "-w", "2") as running:
        wait_until(lambda: len(running.workers()) == 2, what="the workers")
        for path in ("one", "resting"):
            assert running.get(f"/{path}?id={path}&go=1").status == 200
        yield running


def storm(site):
    """Ten clients come to the decorated views again and again. Return the answers, and how long a plain page took."""
    answers, times, over = [], [], threading.Event()

    def visit(number):
        while not over.is_set():
            found = site.get(f"/{('one', 'resting')[number % 2]}?id=visitor&go=1")
            answers.append((number % 2, found.status, int(found.headers["Retry-After"])))

    clients = [threading.Thread(target=visit, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for _ in range(ROUNDS):
            known = len(answers) + CLIENTS
            wait_until(lambda known=known: len(answers) > known)
            began = time.monotonic()
            assert site.get("/ping").status == 200
            times.append(time.monotonic() - began)
    finally:
        over.set()
        for client in clients:
            client.join()
    return answers, times


def check(answers, times):
    assert {status for _, status, _ in answers} == {503}
    assert {after for which, _, after in answers if which == 1} == {30}  # of the one that is paused
    assert max(times) < ANSWERS, times


def test_two_sync_workers_answer_while_one_view_is_held_elsewhere_and_one_is_paused(site):
    control.pause("resting", by="ann", using=site.alias)
    with semaphore("one", using=site.alias):
        check(*storm(site))
    control.resume("resting", by="ann", using=site.alias)
    assert site.get("/resting?id=after&go=1").status == 200


def test_two_sync_workers_answer_while_one_of_them_holds_and_one_view_is_paused(site):
    control.pause("resting", by="ann", using=site.alias)
    with site.call("/one?id=holds") as holder:
        site.marks.wait("in-holds")
        check(*storm(site))
        site.marks.set("go-holds")
        assert holder.answer().status == 200
    control.resume("resting", by="ann", using=site.alias)
    assert queries.semaphore("one", using=site.alias).held == 0
