"""Workers that are limited, stopped, killed and cut off from their broker, while tasks hold, wait, or are away."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from celery import Celery
from celery.exceptions import Reject, TaskRevokedError
from kombu.exceptions import OperationalError

from django_sqlsem import AcquireTimeoutError, queries, semaphore
from django_sqlsem.contrib.celery import retry
from django_sqlsem.testing import held
from tests.places.celery_workers import Broker, Worker, alias, lines, name, of, path, peak
from tests.support.databases import held_rows
from tests.support.processes import wait_for_end
from tests.support.threads import wait_until

__all__ = ["alias", "name", "path"]  # fixtures

SOAK = pytest.mark.soak
BROKERS = ["rabbitmq", pytest.param("redis", marks=SOAK)]


@pytest.fixture(scope="module", params=BROKERS)
def prefork(request: Any, alias: str) -> Iterator[Worker]:
    """A worker with processes that tests may kill."""
    with Broker(request.param) as broker, Worker(broker, concurrency=2) as worker:
        yield worker.ready()
        worker.stop()


def waiting(name: str) -> int:
    """How many wait in the database."""
    found = queries.semaphore(name)
    return found.waiting if found else 0


# One worker's children.


def test_a_soft_limit_while_it_holds(prefork, name, path, alias):
    result = prefork.broker.send("work", path, name, "slow", 60, soft_time_limit=1)
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=60)
    assert [line["what"] for line in lines(path)] == ["begin"]
    assert prefork.broker.send("work", path, name).get(timeout=60) == "work"


@SOAK
def test_a_soft_limit_while_it_waits_reaches_the_task(prefork, name, path):
    with held(name, total=1):
        result = prefork.broker.send("outer", path, name, 60, soft_time_limit=2)
        other = prefork.broker.send("patient", path, name, soft_time_limit=2)
        assert result.get(timeout=60) == "soft"
        with pytest.raises(SoftTimeLimitExceeded):
            other.get(timeout=60)
        wait_until(lambda: waiting(name) == 0, what="nobody waits")
    assert of(path, "begin") == []


def test_a_hard_limit_while_it_holds_and_while_it_waits(prefork, name, path):
    with held(f"{name}-other", total=1):
        waits = prefork.broker.send("patient", path, f"{name}-other", time_limit=2)
        result = prefork.broker.send("work", path, name, "slow", 60, time_limit=2)
        for each in (result, waits):
            with pytest.raises(TimeLimitExceeded):
                each.get(timeout=60)
        wait_until(lambda: waiting(f"{name}-other") == 0, what="nobody waits")
    assert prefork.broker.send("work", path, name).get(timeout=60) == "work"


@SOAK
def test_revoked_with_terminate_while_it_holds_and_while_it_waits(prefork, name, path):
    result = prefork.broker.send("work", path, name, "slow", 60)
    wait_until(lambda: of(path, "begin"), timeout=60, what="it holds")
    waits = prefork.broker.send("patient", path, name)
    wait_until(lambda: waiting(name) == 1, timeout=60, what="it waits")
    for each in (waits, result):
        prefork.broker.app.control.revoke(each.id, terminate=True)
        with pytest.raises(TaskRevokedError):
            each.get(timeout=60)
    assert prefork.broker.send("work", path, name).get(timeout=60) == "work"


def test_a_killed_child_s_task_runs_again(prefork, name, path):
    result = prefork.broker.send("late", path, name, "late", 600)
    first = wait_until(lambda: of(path, "begin"), timeout=60, what="it holds")[0]
    os.kill(first["pid"], signal.SIGKILL)
    assert result.get(timeout=120) == "late"
    begun = of(path, "begin")
    assert len(begun) == 2
    assert begun[0]["pid"] != begun[1]["pid"]
    assert prefork.process.poll() is None


def test_soft_limits_that_strike_anywhere_in_an_acquire(prefork, name, path, alias):
    ends = time.monotonic() + 120
    while len(of(path, "struck")) < 40:
        assert time.monotonic() < ends
        begun = len(of(path, "storm"))
        result = prefork.broker.send("storm", path, name, 3)
        pid = wait_until(lambda begun=begun: of(path, "storm")[begun:], timeout=60, what="the storm")[0]["pid"]
        until = time.monotonic() + 2.5
        while time.monotonic() < until and not result.ready():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(random.uniform(0.005, 0.05))
        result.get(timeout=60, propagate=False)
        wait_until(lambda: not held_rows(alias), what="nothing is held")
    assert semaphore(name, timeout=0).try_acquire() is not None


# Workers that end, and their successors.


def _stop(how: str, worker: Worker) -> None:
    if how == "kill":
        children = worker.children()
        worker.process.kill()
        worker.wait()
        for pid in children:
            wait_for_end(pid, 120)
    else:
        worker.signal(signal.SIGQUIT if how in ("cold", "soft") else signal.SIGTERM)
        worker.wait()


@pytest.mark.parametrize(
    ("kind", "how", "pool"),
    [
        ("rabbitmq", "warm", "prefork"),
        *(
            pytest.param(kind, how, pool, marks=SOAK)
            for kind in ("rabbitmq", "redis")
            for how in ("warm", "cold", "remapped", "soft", "kill")
            for pool in ("prefork", "threads", "solo", "gevent")
            if (kind, how, pool) != ("rabbitmq", "warm", "prefork") and not (how == "kill" and pool != "prefork")
        ),
    ],
)
def test_a_worker_ends_while_one_task_holds_and_others_are_away(kind, how, pool, alias, name, path):
    conf = {"broker_transport_options": {"visibility_timeout": 20}} if kind == "redis" else {}
    env = {"REMAP_SIGTERM": "SIGQUIT"} if how == "remapped" else {}
    soft = {"worker_soft_shutdown_timeout": 2.0} if how == "soft" else {}
    with Broker(kind, **conf) as broker:
        with Worker(broker, pool=pool, env=env, conf=soft) as worker:
            worker.ready()
            if pool == "solo":  # which would hold and hear nothing meanwhile
                results = [broker.send("late", path, name, f"{nth}", 0) for nth in range(3)]
                with held(name, total=1):
                    wait_until(
                        lambda: len({line["id"] for line in of(path, "retry")}) == 3 - len(of(path, "end")), timeout=90
                    )
                    _stop(how, worker)
            else:
                results = [broker.send("late", path, name, "0", 4 if how in ("warm", "soft") else 30)]
                wait_until(lambda: of(path, "begin"), timeout=60, what="one holds")
                results += [broker.send("late", path, name, f"{nth}", 0.1) for nth in range(1, 4)]
                wait_until(lambda: len({line["id"] for line in of(path, "retry")}) == 3, timeout=60, what="three away")
                _stop(how, worker)
        with Worker(broker, pool=pool) as successor:
            successor.ready()
            words = [result.get(timeout=150) for result in results]
            successor.stop()
    assert words == [f"{nth}" for nth in range(len(words))]
    ended = [line["word"] for line in of(path, "end")]
    if how == "warm":
        assert sorted(ended) == sorted(words)
        assert peak(path) == 1
    else:
        assert set(ended) == set(words)


@SOAK
@pytest.mark.parametrize("kind", ["rabbitmq", "redis"])
@pytest.mark.parametrize("option", ["--max-tasks-per-child=1", "--max-memory-per-child=1"])
def test_children_that_serve_one_task(kind, option, alias, name, path):
    with Broker(kind) as broker, Worker(broker, option, concurrency=2) as worker:
        worker.ready()
        results = [broker.send("work", path, name, f"{nth}") for nth in range(6)]
        assert sorted(result.get(timeout=120) for result in results) == [f"{nth}" for nth in range(6)]
        assert len({line["pid"] for line in of(path, "begin")}) == 6
        worker.stop()
    assert peak(path) == 1
    wait_until(lambda: len(queries.events(name, what=["granted"], using=alias)) == 6, what="the history of all six")


@pytest.mark.parametrize("late", [False, True])
def test_a_broker_that_takes_no_message(late):
    app = Celery("unreachable", broker="amqp://127.0.0.1:1//", set_as_current=False)
    app.conf.update(task_publish_retry=False, broker_connection_retry=False)

    @app.task(name="unreachable", acks_late=late, shared=False)  # else every later app has it too
    def task():
        raise AssertionError("not called")

    task.push_request(id="1", retries=0, called_directly=False, args=(), kwargs={}, delivery_info={})
    with pytest.raises(Reject if late else AcquireTimeoutError) as caught:
        retry(task, 1, AcquireTimeoutError("busy", name="x"))
    assert isinstance(caught.value.__cause__, OperationalError)
    assert not late or caught.value.requeue


@SOAK
def test_a_worker_whose_parent_used_semaphores_before_it_forked(alias, name, path):
    with Broker("rabbitmq") as broker, Worker(broker, env={"SQLSEM_PLACES_PARENT": name}) as worker:
        worker.ready()
        assert broker.send("work", path, f"{name}-used").get(timeout=60) == "work"
        result = broker.send("work", path, name)
        wait_until(lambda: of(path, "retry"), timeout=60, what="the parent's permit keeps it out")
        assert [row.pid for row in held_rows(alias)] == [worker.pid]
        broker.app.control.revoke(result.id)
        os.kill(of(path, "begin")[0]["pid"], signal.SIGKILL)  # one child's end changes nothing
        wait_until(lambda: result.state == "REVOKED", timeout=60, what="it is revoked")
        assert [row.pid for row in held_rows(alias)] == [worker.pid]
        worker.stop()
