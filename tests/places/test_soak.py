"""Every place at once, on one semaphore, under every kind of trouble.

``make soak SOAK_ARGS='-k everything'`` takes 20 minutes, or ``SQLSEM_SOAK_SECONDS``; the same for a few seconds is part
of every run.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from django.conf import settings
from django.db import connections

from tests.places import presence
from tests.places.presence import NAME, SLOTS, TABLE
from tests.places.soak_load import LONGEST, Clients, Tasks, Trouble, hold
from tests.places.soak_places import COMMANDS, Program, Runs
from tests.places.soak_watch import Samples, Watch, summary
from tests.support.databases import child_environment, covered
from tests.support.processes import Child
from tests.support.threads import wait_until

psycopg = pytest.importorskip("psycopg")

LEASE: Final = 20.0
#: Where bodies are inside.
PLACES: Final = {"gunicorn sync", "uvicorn sync", "uvicorn async", "celery", "locks run"}
#: Sessions of processes that have just ended, at the most.
DYING: Final = 6
#: The exit codes of ``locks run``: done, busy, its command was killed, it was killed itself.
ENDS: Final = {0, 75, 137, -9}
#: What a client may get: done, busy, given up by a server that ends; or nothing, as it left, or the server went away.
ANSWERS: Final = {"200", "503", "left", "cut", "refused"}


@pytest.fixture
def dsn(committed: None) -> str:
    """The test's own PostgreSQL database."""
    if "postgres" not in covered():
        pytest.skip("no PostgreSQL")
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    found = connections["postgres"].settings_dict
    return str(psycopg.conninfo.make_conninfo(**{to: found[key] for key, to in names.items() if found.get(key)}))


@pytest.fixture
def broker() -> str:
    """The address of a RabbitMQ server."""
    if (found := settings.FOUND.get("rabbitmq")) is not None:
        return str(found.where)
    kombu = pytest.importorskip("kombu")
    url = os.environ.get("SQLSEM_TEST_RABBITMQ_URL") or "amqp://guest:guest@127.0.0.1:5672//"
    try:
        with kombu.Connection(url, connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=1)
    except Exception as error:
        pytest.skip(f"no rabbitmq: {error}")
    return url


def test_the_counter_sees_one_too_many_and_no_dead_one(dsn, monkeypatch):
    monkeypatch.setenv("SQLSEM_SOAK_DSN", dsn)
    watch = Watch(dsn)
    with contextlib.closing(watch), contextlib.ExitStack() as stack:
        watch.rows(TABLE)
        stack.callback(watch.rows, "DROP TABLE soak_entry")
        stack.callback(presence.close)
        with Child("from tests.places.presence import inside\nwith inside('child'): say('in'); listen()") as child:
            child.expect("in")
            with presence.inside("a"), presence.inside("b"):
                with presence.inside("c"):
                    assert watch.rows("SELECT seen, cardinality(excess) FROM soak_entry ORDER BY id DESC LIMIT 1") == [
                        (SLOTS + 1, SLOTS + 1)
                    ]
                name = f"{presence.NAME}{child.pid} {presence.started(child.pid)}"
                assert presence.lives(name)
                child.kill()
                assert not presence.lives(name)
                with presence.inside("d"):
                    assert watch.rows("SELECT excess FROM soak_entry ORDER BY id DESC LIMIT 1") == [(None,)]


@pytest.mark.soak
def test_everything(dsn, broker, settings, tmp_path, monkeypatch, capsys):
    """Trouble for three fifths of the time, then none, so that some processes become old."""
    seconds = float(os.environ.get("SQLSEM_SOAK_SECONDS") or 1200)
    places = Places(dsn, broker, settings, tmp_path, monkeypatch)
    with places.running(idle=5.0):
        # Tasks that come back leave cycles of tracebacks, and it takes the collector a while to come to them.
        places.begin(pause=3.0, every=60.0 if seconds > 300 else 10.0, warm=min(180.0, seconds / 5))
        begun = time.monotonic()
        while time.monotonic() < begun + seconds and not places.trouble.problems:
            time.sleep(0.2)
            if time.monotonic() > begun + seconds * 0.6 and not places.trouble.is_over:
                places.trouble.end()
        places.settle()
    places.tell(capsys)
    places.check()
    if seconds >= 300:
        assert len(places.trouble.done) == 9
        old = places.samples.of(seconds / 5)
        assert {life.what for life in old} == {"gunicorn main", "gunicorn", "uvicorn", "celery main", "celery"}
        assert [life for life in old if life.grown > 0.2] == []


def test_a_little_of_it_all(dsn, broker, settings, tmp_path, monkeypatch, capsys):
    """One holder of each kind is killed."""
    places = Places(dsn, broker, settings, tmp_path, monkeypatch)
    with places.running(idle=1.0):
        places.begin(pause=0.2, every=2.0, warm=0.0, brief=True)
        wait_until(lambda: places.trouble.is_over and places.entered() == PLACES, timeout=200, what="all was there")
        places.settle()
    places.check()
    assert {kill.what for kill in places.trouble.kills} >= {"gunicorn worker", "pool child"}


class Places:
    """All places, what they are put through, and what is seen of it."""

    def __init__(self, dsn: str, broker: str, settings: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._dsn, self._broker, self._settings, self._directory = dsn, broker, settings, directory
        self._monkeypatch = monkeypatch
        self._queue = f"sqlsem-soak-{uuid.uuid4().hex[:12]}"
        self._programs: dict[str, Program] = {}
        self.lines: dict[str, Any] = {}

    @contextlib.contextmanager
    def running(self, idle: float) -> Iterator[None]:
        """Servers and workers run inside the block. Unused connections stay open for ``idle`` seconds."""
        # Views wait with everybody else.
        self._settings.SQLSEM = {"DATABASE": "postgres", "LEASE": LEASE, "IDLE": idle, "VIEW_MAX_WAITING": None}
        for name, value in {"DSN": self._dsn, "BROKER": self._broker, "QUEUE": self._queue}.items():
            self._monkeypatch.setenv(f"SQLSEM_SOAK_{name}", value)
        self._environment = child_environment(DJANGO_SETTINGS_MODULE="tests.places.soak_settings")
        from tests.places.soak_celery import configured  # which reads the environment

        with contextlib.ExitStack() as stack:
            self.watch = Watch(self._dsn)
            stack.callback(self.watch.close)
            stack.callback(self.watch.rows, "DROP TABLE soak_entry")
            self.watch.rows(TABLE)
            self._app = configured(self._broker, self._queue)
            stack.callback(self._delete_queue)
            for kind in COMMANDS:
                self._programs[kind] = Program(kind, self._environment, self._directory)
                stack.callback(self._programs[kind].end)
            for program in self._programs.values():
                program.wait_until_ready()
            self._stack = stack
            yield

    def _processes(self) -> dict[str, list[int]]:
        masters = {f"{kind} main": [one.process.pid] for kind, one in self._programs.items() if kind != "uvicorn"}
        return {**masters, **{kind: one.workers() for kind, one in self._programs.items()}, "run": self._runs.workers()}

    def begin(self, *, pause: float, every: float, warm: float, brief: bool = False) -> None:
        """Begin with everything."""
        later = self._stack.callback
        self._runs = Runs(self._environment, hold, pause / 2, self._directory / "runs.log")
        later(self._runs.end)
        self.samples = Samples(self.watch, self._processes, every, warm)
        later(self.samples.end)
        self._clients = Clients(self._programs)
        later(self._clients.end)
        self._tasks = Tasks(self._app, lambda: self.watch.ran("celery"))
        later(self._tasks.end)
        self.trouble = Trouble(self._programs, self._runs, self.watch.held, pause, LEASE, brief)
        later(self.trouble.end)
        self._begun = time.monotonic()

    def entered(self) -> set[str]:
        """Return the places at which a body was inside."""
        return {row[0] for row in self.watch.rows("SELECT DISTINCT place FROM soak_entry")}

    def settle(self) -> None:
        """End the load, wait until all is given back and closed, end the programs, and look at what is left."""
        for part in (self.trouble, self._tasks, self._runs, self._clients):
            part.end()
        lasted, ended = time.monotonic() - self._begun, time.monotonic()
        for program in self._programs.values():
            program.wait_until_ready()
        over(lambda: not self.watch.held() and not self._backlog(), LEASE + 60)
        # They are closed a minute after their last use.
        over(lambda: self.watch.sessions() <= self.samples.sessions[0], 120)
        self.samples.end()
        self.samples.take()
        for program in self._programs.values():
            program.end()
        over(lambda: not self.watch.held(), LEASE + 5)
        leaked = [f"slot {slot} by pid {pid}" for slot, pid, _ in self.watch.held()]
        ((peak,),) = self.watch.rows("SELECT max(seen) FILTER (WHERE crowd IS NULL) FROM soak_entry")
        crowds = self.watch.rows("SELECT extract(epoch FROM at), excess FROM soak_entry WHERE excess IS NOT NULL")
        self.excess = [crowd for at, crowd in crowds if not self._woken(float(at), crowd)]
        self.lines = {
            "most at once": peak,
            f"more than {SLOTS} at once": self.excess or 0,
            "beside one that had stood still": len(crowds) - len(self.excess),
            "leaked after a lease": leaked or 0,
            "settled after": f"{time.monotonic() - ended:.1f} s",
            "trouble": dict(self.trouble.done),
            "answers": {" ".join(key): count for key, count in sorted(self._clients.answers.items())},
            "ends of locks run": self._runs.ends,
            "tasks sent": self._tasks.sent,
            "places": self.entered(),
        }
        self.table = summary(self.watch, lasted, self.lines, self.trouble.kills, self.samples)

    def _woken(self, at: float, crowd: list[str]) -> bool:
        """Whether one of them may have lost its permit while it stood still, and goes on until it heeds that."""
        pids = {int(name.removeprefix(NAME).split()[0]) for name in crowd}
        return any(pid in pids and until - 5 < at < until + LONGEST + 1 for pid, until in self.trouble.stood_still)

    def tell(self, capsys: Any) -> None:
        """Print the summary."""
        with capsys.disabled():
            print(f"\n{self.table}")

    def check(self) -> None:
        """Assert what must be so, however long it took."""
        assert not self.trouble.problems, self.trouble.problems
        assert not self.excess, self.table
        assert self.lines["most at once"] == SLOTS, self.table
        assert not self.lines["leaked after a lease"], self.table
        assert self.lines["places"] == PLACES, self.table
        # By the end of the process: a lease would take longer.
        late = [kill for kill in self.trouble.kills if kill.took is None or kill.took > LEASE / 2]
        assert self.trouble.kills, self.table
        assert not late, self.table
        assert {answer for _, answer in self._clients.answers} <= ANSWERS, self._logs()
        assert set(self._runs.ends) <= ENDS, (self._directory / "runs.log").read_text()[-5000:]
        assert self.samples.sessions[-1] <= self.samples.sessions[0] + 2, self.table
        too_many = [
            (count, most)
            for count, most in zip(self.samples.sessions, self.samples.most, strict=True)
            if count > most + DYING
        ]
        assert not too_many, self.table

    def _backlog(self) -> int:
        """Return how many tasks are in the queue."""
        with self._app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare(self._queue, passive=True).message_count)

    def _delete_queue(self) -> None:
        with self._app.connection_for_write() as connection:
            connection.default_channel.queue_delete(self._queue)
            connection.default_channel.exchange_delete(self._queue)
        self._app.close()

    def _logs(self) -> str:
        return "\n".join(f"--- {kind}\n{each.log.read_text()[-3000:]}" for kind, each in self._programs.items())


def over(condition: Any, timeout: float) -> bool:
    """Wait for a condition; whether it came true."""
    with contextlib.suppress(AssertionError):
        return bool(wait_until(condition, timeout=timeout))
    return False
