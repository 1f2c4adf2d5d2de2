"""Celery's workers as programs of their own, and what a client needs to send them tasks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, Self

import pytest
from celery import Celery
from django.conf import settings
from django.test import override_settings

from tests.support.databases import ROOT, child_environment, covered
from tests.support.processes import is_alive
from tests.support.threads import wait_until

READY = re.compile(r"\bready\.")


def lines(path: str) -> list[dict[str, Any]]:
    """What the tasks have written so far."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []


def of(path: str, what: str, word: str | None = None) -> list[dict[str, Any]]:
    """The lines of one kind."""
    return [line for line in lines(path) if line["what"] == what and word in (None, line.get("word"))]


def peak(path: str) -> int:
    """How many were inside at once, at the most, by the order of the lines."""
    inside = most = 0
    for line in lines(path):
        inside += {"begin": 1, "end": -1}.get(line["what"], 0)
        most = max(most, inside)
    return most


class Broker:
    """A queue of our own on a broker, with a client. Nothing that it does reaches others' workers."""

    def __init__(self, name: str, url: str | None = None, **conf: Any) -> None:
        self.name = name
        self.queue = f"sqlsem-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        where = settings.FOUND.get(name)
        redis = settings.FOUND.get("redis")
        for server, found in ((name, where), ("redis", redis)):  # which keeps the results
            if found is None:
                pytest.skip(f"no {server}: {settings.MISSING[server].reason}")
        prefix = {"global_keyprefix": f"{self.queue}:"}
        self.conf: dict[str, Any] = {
            "broker_url": url or where.where,
            "broker_connection_retry_on_startup": True,
            "result_backend": redis.where,
            "result_backend_transport_options": prefix,
            "result_extended": True,
            "task_default_queue": self.queue,
            "control_exchange": f"{self.queue}-control",
            "event_exchange": f"{self.queue}-event",
            "worker_hijack_root_logger": True,
            "worker_prefetch_multiplier": 1,
            **conf,
        }
        if name == "redis":
            options = {**prefix, "visibility_timeout": 3600, **conf.get("broker_transport_options", {})}
            self.conf["broker_transport_options"] = options
        else:
            self.conf["task_queue_max_priority"] = 5
        self.app = Celery("sqlsem-places-client", set_as_current=False)
        self.app.conf.update(self.conf)

    def sign(self, task: str, *args: Any, **kwargs: Any) -> Any:
        """A signature of a task, immutable."""
        return self.app.signature(f"p.{task}", args=args, kwargs=kwargs, immutable=True)

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        """Send a task, and return its result to be."""
        return self.app.send_task(f"p.{task}", args=args, **options)

    def close(self) -> None:
        """Delete all that was made on the servers."""
        import redis

        with redis.Redis.from_url(settings.FOUND["redis"].where) as client:
            for key in client.scan_iter(f"{self.queue}*", count=1000):
                client.delete(key)
        if self.name == "rabbitmq":
            where = settings.FOUND["rabbitmq"].where  # past any proxy
            with self.app.connection_for_write(url=where) as connection, connection.channel() as channel:
                channel.queue_delete(self.queue)
                for exchange in (self.queue, f"{self.queue}-control.pidbox", f"{self.queue}-event"):
                    channel.exchange_delete(exchange)
                channel.exchange_delete(f"reply.{self.queue}-control.pidbox")
        self.app.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Worker:
    """``celery worker`` on a broker's queue. Leaving the ``with`` block kills it and all that it has started."""

    def __init__(
        self,
        broker: Broker,
        *options: str,
        pool: str = "prefork",
        concurrency: int = 4,
        env: dict[str, str] | None = None,
        conf: dict[str, Any] | None = None,
    ) -> None:
        self.broker = broker
        self.name = f"w{uuid.uuid4().hex[:8]}@sqlsem"
        self._log = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed by close()
        command = ["celery", "--app", "tests.places.celery_app", "worker", f"--pool={pool}", "--loglevel=INFO"]
        command += [f"--concurrency={concurrency}", f"--queues={broker.queue}", f"--hostname={self.name}"]
        command += ["--without-gossip", "--without-mingle", *options]
        configuration = json.dumps({**broker.conf, **(conf or {})})
        environment = child_environment(
            DJANGO_SETTINGS_MODULE="tests.settings", SQLSEM_PLACES_CELERY=configuration, **(env or {})
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The main process."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def ready(self) -> Self:
        """Wait until it serves."""
        wait_until(
            lambda: READY.search(self.log) or self.process.poll() is not None, timeout=120, what="a worker is ready"
        )
        assert self.process.poll() is None, self.log
        return self

    def children(self) -> list[int]:
        """The processes of its pool."""
        return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def signal(self, number: int) -> None:
        """Send its main process a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 90.0) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker goes on:\n{self.log}") from None

    def stop(self) -> None:
        """End it warmly."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.wait()

    def close(self) -> None:
        """Kill what is left of it."""
        left = [] if self.process.poll() is not None else self.children()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(60)
        for pid in left:
            wait_until(lambda pid=pid: not is_alive(pid), timeout=60, what="the pool has ended")
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def lock_alias() -> str:
    """Where the workers keep their locks."""
    return next((alias for alias in ("postgres", "mariadb") if alias in covered()), "default")


@pytest.fixture(scope="module")
def alias(django_db_setup: None, django_db_blocker: Any) -> Any:
    """A database that workers and tests of a module share. Every test takes names of its own."""
    from django.db import connections

    from django_sqlsem import lifecycle
    from tests.support import databases

    # Not by assignment, of which nobody is told: the library remembers what tests before this module had it read.
    with django_db_blocker.unblock(), override_settings(SQLSEM={"DATABASE": lock_alias()}):
        try:
            yield lock_alias()
        finally:
            lifecycle.stop_all()
            databases.delete_rows(lock_alias())
            connections.close_all()


@pytest.fixture
def name(alias: str, request: Any) -> Any:
    """A semaphore's name; at the end nobody may hold anything."""
    from tests.support import databases

    yield f"places-{uuid.uuid4().hex}"
    if request.node.get_closest_marker("leaves_held") is None:
        databases.assert_nothing_held(alias, within=30)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The file for the tasks' lines."""
    return str(tmp_path / "lines")
