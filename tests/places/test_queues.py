"""Huey, Dramatiq and RQ: real workers, the recipes of the documentation, time limits, and kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import uuid

import pytest

from django_sqlsem import semaphore
from django_sqlsem.testing import held
from tests.places.tasks_notes import notes
from tests.support.databases import OutsideCounter, assert_nothing_held, covered, held_rows
from tests.support.processes import Child, is_alive
from tests.support.threads import wait_until

ALIAS = "postgres" if "postgres" in covered() else "default"


class Place:
    """One queue of a test: its processes, and its name."""

    def __init__(self, stack, app, where, **env):
        self.stack, self.app = stack, app
        self.name = f"sqlsem-tests-{uuid.uuid4().hex[:12]}"
        names = {"SQLSEM_TEST_QUEUE": where, "SQLSEM_TEST_QUEUE_NAME": self.name, "SQLSEM_TEST_QUEUE_DATABASE": ALIAS}
        self.env = names | env
        self.client = self.start("client")

    def start(self, function, *args):
        """Start a process; it ends with the test."""
        return self.stack.enter_context(Child(f"tests.places.{self.app}:{function}", *args, env=self.env))

    def worker(self, *args):
        """Start a worker."""
        worker = self.start("worker", *args)
        worker.expect("ready")
        return worker

    def ask(self, expression):
        """Return the value of an expression in the client."""
        self.client.send(expression)
        return json.loads(self.client.expect())


@pytest.fixture
def stack(committed, settings):
    settings.SQLSEM = {"DATABASE": ALIAS, "LEASE": 10}
    with contextlib.ExitStack() as stack:
        yield stack
    assert_nothing_held(ALIAS)


@pytest.fixture
def counter(stack):
    with OutsideCounter(ALIAS) as counter:
        yield counter


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "notes")


def words(path):
    """What the tasks have said."""
    return [line["word"] for line in notes(path)]


def come_back(counter, entered):
    """Wait until so many have been in, and nothing is held."""
    wait_until(lambda: counter.entered == entered, timeout=120, what=f"{entered} to have been in")
    wait_until(lambda: not held_rows(ALIAS), timeout=60, what="the slots to be free")
    assert (counter.peak, counter.current) == (2, 0)


# Huey


@pytest.mark.parametrize(
    ("storage", "kind"), [pytest.param("sqlite", "process", marks=pytest.mark.soak), ("redis", "thread")]
)
def test_huey(stack, counter, path, tmp_path, request, storage, kind):
    where = str(tmp_path / "huey.sqlite3") if storage == "sqlite" else request.getfixturevalue("redis_url")
    place = Place(stack, "huey_app", where, DJANGO_SETTINGS_MODULE="tests.places.huey_settings")
    options = [f"--worker-type={kind}", "--delay=0.1", "--max-delay=0.3", "--scheduler-interval=1"]
    stack.callback(lambda: place.ask("HUEY.flush() or HUEY.storage.flush_results()"))
    first = place.worker("--workers=3", *options)
    place.ask("[kept.append(counted(0.1)) for _ in range(5)] and None")
    come_back(counter, 5)
    wait_until(lambda: place.ask("[each(preserve=True) for each in kept]") == ["counted"] * 5, timeout=60)
    with held("queued:strict"):
        place.ask("kept.append(strict())")
        wait_until(lambda: "AcquireTimeoutError" in str(place.ask("repr(kept[-1]._get(True))")), timeout=60)
    if kind == "thread":
        place.ask(f"stuck({path!r}) and None")
        wait_until(lambda: notes(path), timeout=60, what="one to be stuck")
        first.kill()
        place.worker("--workers=3", *options)
        place.ask("counted(0.1) and counted(0.1) and None")
        come_back(counter, 7)


def test_tasks_of_huey_are_refused():
    from huey import MemoryHuey

    made = MemoryHuey().task()(notes)
    with pytest.raises(TypeError, match=r"@huey\.task\(\)\n    @semaphore\('r'\)\n    def notes\(\.\.\.\):"):
        semaphore("r")(made)


# Dramatiq


@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_dramatiq(stack, counter, path, request, broker):
    place = Place(stack, "dramatiq_app", request.getfixturevalue(f"{broker}_url"))
    stack.callback(lambda: place.ask("clean()"))
    first = place.worker(3)
    place.ask("[counted.send(0.1) for _ in range(5)] and None")
    come_back(counter, 5)  # max_retries=0: to be busy has spent none

    with semaphore("never").acquire():
        place.ask(f"[stuck.send({path!r}), waits.send({path!r})] and None")
        wait_until(lambda: "TimeLimitExceeded" in words(path), timeout=60, what="the time limit to strike the waiter")
        wait_until(lambda: not semaphore("never").status().waiting, timeout=60, what="the waiter to leave")
    assert "held" not in words(path)
    wait_until(lambda: "stuck" in words(path), timeout=60, what="the other one to hold")
    wait_until(lambda: not held_rows(ALIAS), timeout=60, what="the time limit to give the slot back")

    place.ask(f"killed.send({path!r}) and None")
    wait_until(lambda: "killed" in words(path), timeout=60, what="one to hold")
    first.kill()
    assert_nothing_held(ALIAS)
    second = place.worker(3)
    place.ask("[counted.send(0.1) for _ in range(2)] and None")
    wait_until(lambda: counter.entered == 7, timeout=120, what="the others to run")
    second.signal(signal.SIGTERM)
    assert second.wait(60) is not None
    assert (counter.peak, counter.current) == (2, 0)


def test_actors_of_dramatiq_are_refused():
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    made = dramatiq.actor(broker=StubBroker())(notes)
    with pytest.raises(TypeError, match=r"@dramatiq\.actor\n    @semaphore\('r'\)\n    def notes\(\.\.\.\):"):
        semaphore("r")(made)


# RQ


def test_rq(stack, counter, path, redis_url):
    place = Place(stack, "rq_app", redis_url)
    stack.callback(lambda: place.ask("clean()"))
    workers = [place.worker() for _ in range(3)]
    jobs = place.ask("[QUEUE.enqueue(counted, 0.1).id for _ in range(4)]")
    come_back(counter, 4)
    wait_until(lambda: all(place.ask(f"state({each!r})")[1] == "counted" for each in jobs), timeout=60)
    both = place.ask("[below.delay().id, above.delay().id]")
    wait_until(lambda: [place.ask(f"state({each!r})")[1] for each in both] == ["below", "above"], timeout=60)

    limited = place.ask(f"QUEUE.enqueue(stuck, {path!r}, 'limited', job_timeout=4).id")
    wait_until(lambda: place.ask(f"state({limited!r})")[0].endswith("failed"), timeout=60, what="the timeout")
    assert "JobTimeoutException" in place.ask(f"state({limited!r})")[2]
    wait_until(lambda: not held_rows(ALIAS), timeout=60, what="the timeout to give the slot back")

    place.ask(f"QUEUE.enqueue(stuck, {path!r}, 'killed').id")
    wait_until(lambda: "killed" in words(path), timeout=60, what="one to hold")
    [horse] = [line["pid"] for line in notes(path) if line["word"] == "killed"]
    assert is_alive(horse)
    assert horse not in [worker.pid for worker in workers]
    os.kill(horse, signal.SIGKILL)
    place.ask("[QUEUE.enqueue(counted, 0.1).id for _ in range(2)]")
    come_back(counter, 6)
    for worker in workers:
        worker.signal(signal.SIGTERM)  # or its scheduler would go on
    for worker in workers:
        worker.wait(60)


@pytest.mark.soak
def test_rq_without_a_fork(stack, counter, redis_url):
    place = Place(stack, "rq_app", redis_url)
    stack.callback(lambda: place.ask("clean()"))
    workers = [place.worker(True) for _ in range(2)]
    place.ask("[QUEUE.enqueue(counted, 0.1).id for _ in range(3)]")
    come_back(counter, 3)
    for worker in workers:
        worker.signal(signal.SIGTERM)
    for worker in workers:
        worker.wait(60)
