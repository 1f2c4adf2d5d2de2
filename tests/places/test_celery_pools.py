"""Busy tasks in real workers: each pool on each broker. All kinds of tasks are busy at once, and then come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import chain, chord, group, states
from celery.exceptions import TaskRevokedError

from django_sqlsem import AcquireTimeoutError, queries, semaphore
from django_sqlsem.testing import held
from tests.places.celery_workers import Broker, Worker, alias, lines, name, of, path, peak
from tests.support.databases import assert_nothing_held
from tests.support.threads import wait_until

__all__ = ["alias", "name", "path"]  # fixtures

_PLACES = [(broker, pool) for broker in ("rabbitmq", "redis") for pool in ("prefork", "threads", "solo", "gevent")]


def in_workers(*small: tuple[str, str]) -> Any:
    """Have a test run in all places: these in the default run, and the others in `make soak`."""
    places = [
        pytest.param(each, id="-".join(each), marks=[] if each in small else pytest.mark.soak) for each in _PLACES
    ]
    return pytest.mark.parametrize("place", places, indirect=True, scope="module")


EVERYWHERE = in_workers(("rabbitmq", "prefork"))
LATER = in_workers()
#: How a message looks that must look the same when it comes back.
OPTIONS: dict[str, Any] = {
    "headers": {"x-sqlsem": "kept"},
    "priority": 3,
    "shadow": "shown-as",
    "expires": 600,
    "time_limit": 300,
    "soft_time_limit": 200,
    "retries": 3,  # more than the task's max_retries: its own retries may have had a limit of their own
}


@pytest.fixture(scope="module")
def place(request: Any, alias: str) -> Iterator[SimpleNamespace]:
    """A worker."""
    broker, pool = request.param
    with Broker(broker) as found, Worker(found, pool=pool) as worker:
        worker.ready()
        yield SimpleNamespace(broker=found, worker=worker, pool=pool, alias=alias)
        worker.stop()
        assert_nothing_held(alias)


@pytest.fixture(scope="module")
def busy(place: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What became of tasks of all kinds that were refused twice at least."""
    broker, directory, name = place.broker, tmp_path_factory.mktemp("busy"), f"busy-{place.broker.queue}"
    names = ("plain", "about", "auto", "key", "own", "called", "ignored", "link", "chain", "group", "chord", "replaced")
    files = {each: str(directory / each) for each in (*names, "raise", "body")}

    def sign(task: str, word: str, *more: Any, **options: Any) -> Any:
        return broker.sign(task, files[word], f"{name}-{word}", *more).set(**options)

    def join(word: str) -> Any:
        return broker.app.signature("p.join", args=(files[word], f"{name}-{word}"))

    def failed(word: str) -> Any:
        return broker.app.signature("p.failed", args=(files[word],))

    results, seen = {}, {}
    with contextlib.ExitStack() as body, contextlib.ExitStack() as stack:
        for each in files:
            with semaphore(f"{name}-{each}"):
                pass  # so that holds of this name are known to be short, and nobody is put off for long
            (body if each == "body" else stack).enter_context(held(f"{name}-{each}", total=1))
        work = {each: sign("work", each) for each in names}
        sent = {
            "plain": work["plain"],
            "about": sign("about", "about", **OPTIONS),
            "auto": sign("auto", "auto"),
            "key": sign("auto", "key", "key"),
            "own": sign("own", "own"),
            "called": sign("called", "called"),
            "ignored": sign("work", "ignored", ignore_result=True),
            "link": sign("work", "link", link=broker.app.signature("p.note", args=(files["link"],))),
            "raise": sign("auto_raise", "raise", link_error=failed("raise")),
            "chain": chain(broker.sign("add", 1), join("chain"), broker.app.signature("p.add", args=(2,))),
            "group": group(sign("work", "group", "a"), sign("work", "group", "b")),
            "chord": chord([work["chord"], sign("skipped", "chord"), sign("work", "chord", "c")], join("body")),
            "replaced": sign("replaced", "replaced"),
        }
        for each, signature in sent.items():
            results[each] = signature.apply_async()
        for each in names:
            wait_until(lambda each=each: len(of(files[each], "retry")) >= 2, timeout=90, what=f"{each} was busy twice")
        plain = broker.app.AsyncResult(results["plain"].id)
        seen["state"], seen["result"] = plain.state, plain.result
        assert [line["what"] for word in names for line in lines(files[word]) if line["what"] == "begin"] == []
        stack.close()
        wait_until(lambda: of(files["body"], "retry"), timeout=90, what="the chord's body was busy")
        body.close()
        values = {}
        for each, result in results.items():
            if each != "ignored":
                values[each] = result.get(timeout=90, propagate=False)
    wait_until(lambda: of(files["ignored"], "end"), timeout=60, what="the task whose result is ignored")
    return SimpleNamespace(results=results, values=values, files=files, **seen)


@EVERYWHERE
def test_a_busy_task_comes_back_and_spends_nothing(busy):
    assert busy.values["plain"] == "work"  # max_retries=0
    assert [line["retries"] for line in of(busy.files["plain"], "begin")] == [0]
    assert {line["retries"] for line in of(busy.files["plain"], "retry")} == {0}
    assert busy.values["called"] == "called"  # max_retries=None


@EVERYWHERE
def test_while_it_is_away_its_state_is_retry_and_then_success(busy):
    assert busy.state == states.RETRY
    assert isinstance(busy.result, AcquireTimeoutError)
    assert busy.results["plain"].state == states.SUCCESS


@EVERYWHERE
def test_the_message_comes_back_as_it_was(busy, place):
    about = busy.values["about"]
    assert about["id"] == about["root_id"] == busy.results["about"].id
    assert about["headers"] == OPTIONS["headers"]
    assert about["shadow"] == OPTIONS["shadow"]
    assert about["retries"] == OPTIONS["retries"]
    assert about["expires"]
    assert about["timelimit"] == [300, 200]
    assert about["delivery"]["routing_key"] == place.broker.queue
    assert about["delivery"]["priority"] == OPTIONS["priority"]
    assert about["max_retries"] == 1
    assert about["override"] == "none"


@EVERYWHERE
def test_automatic_retries_neither_see_nor_count_it(busy):
    assert busy.values["auto"] == [1, 3]
    assert [line["retries"] for line in of(busy.files["auto"], "begin")] == [0, 1]
    assert isinstance(busy.values["key"], KeyError)
    assert len(of(busy.files["key"], "begin")) == 1


@EVERYWHERE
def test_retries_with_a_limit_of_their_own_are_counted_as_ever(busy):
    assert busy.values["own"] == 4
    assert [line["retries"] for line in of(busy.files["own"], "begin")] == [0, 1, 2, 3, 4]


@EVERYWHERE
def test_a_task_class_s_own_call_and_its_handlers(busy):
    assert [line["error"] for line in of(busy.files["called"], "on_retry")][:2] == ["AcquireTimeoutError"] * 2
    assert {line["retries"] for line in of(busy.files["called"], "on_retry")} == {0}
    assert len(of(busy.files["called"], "call")) == len(of(busy.files["called"], "retry")) + 1


@EVERYWHERE
def test_callbacks_run_once_when_it_has_run(busy):
    wait_until(lambda: of(busy.files["link"], "link"), timeout=60, what="the callback")
    assert [line["result"] for line in of(busy.files["link"], "link")] == ["work"]
    assert [line["what"] for line in lines(busy.files["link"])][-3:] == ["begin", "end", "link"]


@EVERYWHERE
def test_raise_fails_the_task_and_tells_its_errback(busy):
    assert isinstance(busy.values["raise"], AcquireTimeoutError)
    wait_until(lambda: of(busy.files["raise"], "errback"), timeout=60, what="the errback")
    assert [line["error"] for line in of(busy.files["raise"], "errback")] == ["AcquireTimeoutError"]


@EVERYWHERE
def test_chains_groups_and_chords_end_once(busy):
    assert busy.values["chain"] == [1, 2]
    assert sorted(busy.values["group"]) == ["a", "b"]
    assert busy.values["chord"] == ["work", None, "c"]
    assert len(of(busy.files["body"], "begin")) == 1
    assert len(of(busy.files["chord"], "begin")) == 2


@EVERYWHERE
def test_a_task_that_puts_another_in_its_place(busy):
    assert busy.values["replaced"] == "in its place"
    assert [line["word"] for line in of(busy.files["replaced"], "begin")] == ["replaced", "in its place"]


@EVERYWHERE
def test_a_task_whose_result_is_ignored_runs_once(busy):
    assert len(of(busy.files["ignored"], "begin")) == 1


@LATER
def test_bodies_that_another_task_runs_wait_instead(place, name, path):
    """``starmap`` and ``chunks`` call the task: nothing would come back, so it waits as any call does."""
    starmap = place.broker.app.signature(
        "celery.starmap", kwargs={"task": place.broker.sign("work"), "it": [(path, name, word) for word in "ab"]}
    )
    with held(name, total=1) as [permit]:
        result = starmap.apply_async()
        wait_until(lambda: queries.semaphore(name).waiting == 1, timeout=60, what="it waits")
        permit.release()
        assert result.get(timeout=60) == ["a", "b"]
    assert of(path, "retry") == []


@LATER
def test_a_busy_task_that_expires_is_revoked(place, name, path):
    with held(name, total=1):
        result = place.broker.send("work", path, name, expires=6)
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=90)
        assert of(path, "retry")
        assert semaphore(name).status().away == 1  # which nobody waits for, and lapses by itself
    assert place.broker.send("work", path, name).get(timeout=60) == "work"
    assert len(of(path, "begin")) == 1


@EVERYWHERE
def test_a_busy_task_can_be_revoked(place, name, path):
    with held(name, total=1):
        result = place.broker.send("work", path, name)
        wait_until(lambda: of(path, "retry"), timeout=60, what="it was busy")
        place.broker.app.control.revoke(result.id)
        with pytest.raises(TaskRevokedError, match="revoked"):
            result.get(timeout=90)
    assert of(path, "begin") == []


@LATER
def test_a_countdown_of_the_sender_s(place, name, path):
    with held(name, total=1):
        result = place.broker.send("work", path, name, countdown=1)
        wait_until(lambda: of(path, "retry"), timeout=60, what="it was busy")
    assert result.get(timeout=60) == "work"


@in_workers(("rabbitmq", "prefork"), ("redis", "prefork"))
def test_never_more_than_slots(place, name, path):
    results = [place.broker.send("two", path, name, f"{nth}", 0.2) for nth in range(8)]
    assert sorted(result.get(timeout=120) for result in results) == [f"{nth}" for nth in range(8)]
    assert len(of(path, "begin")) == 8
    assert 1 <= peak(path) <= 2
    assert place.pool == "solo" or len({(line["pid"], line["thread"]) for line in of(path, "begin")}) > 1


@EVERYWHERE
def test_who_was_refused_first_is_served_first(place, name, path):
    if place.pool == "solo":
        pytest.skip("it runs one task at a time: two cannot wait")
    with semaphore(name):
        pass
    with held(name, total=1) as [permit]:
        first = place.broker.send("ranked", path, name, "first")
        wait_until(lambda: of(path, "retry"), timeout=90, what="the first was refused")
        later = place.broker.send("patient", path, name, "later")
        wait_until(lambda: queries.semaphore(name).waiting == 2, timeout=90, what="the first is back, behind the later")
        permit.release()
        assert (first.get(timeout=60), later.get(timeout=60)) == ("first", "later")
    assert [line["word"] for line in of(path, "begin")] == ["first", "later"]
