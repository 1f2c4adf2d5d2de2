"""``manage.py demo``: real web processes and real task processes fight for three slots."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection
from django.urls import reverse

from django_sqlsem import AcquireTimeoutError, mutex, semaphore
from example_project.celery import app
from example_project.demo import meter
from example_project.demo.children import HOST, Child, ChildError, free_port, is_free
from example_project.demo.load import Load, get
from example_project.demo.models import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


DEFAULT_PORT = 8000
VISITORS, VISITORS_PER_WORKER = 16, 6
SECONDS_BEFORE_CALM = 15
SECONDS_TO_CRASH = 45
SLOTS = 3
REPORTS = semaphore("reports", slots=SLOTS)
DEMO = mutex("demo", timeout=0, lease=10)


class Command(BaseCommand):
    help = (
        "Runs web processes and Celery processes that fight for three slots, and counts with a counter of its own"
        " how many are in at once. Exits with 0 only if there were never more than the slots."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--seconds", type=float, help="end after this long; default: at Ctrl-C")
        parser.add_argument("--workers", type=int, default=2, help="web processes, and as many for tasks; default 2")
        parser.add_argument(
            "--port", type=int, help=f"of the web server on {HOST}; default {DEFAULT_PORT} or a free one"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.seconds: float | None = options["seconds"]
        self.workers: int = options["workers"]
        if self.seconds is not None and not 0 < self.seconds < threading.TIMEOUT_MAX:
            raise CommandError("--seconds must be more than 0, and finite.")
        if self.workers < 1:
            raise CommandError("--workers must be 1 or more.")
        if options["port"] is not None and not 1 <= options["port"] <= 65535:
            raise CommandError("--port must be from 1 to 65535.")
        self.slots = 0
        self.now = Meter()
        self.stopped = threading.Event()
        self.folder: Path = settings.VAR_DIR
        with ExitStack() as stack:
            stack.enter_context(self._only_one_here())
            stack.enter_context(self._signals())
            self.port = self._port(options["port"])
            self.load = Load(
                self.port,
                visitors=VISITORS + VISITORS_PER_WORKER * self.workers,
                pending=lambda sent: sent - self.now.finished - self.now.failed,
                most_pending=8 * self.workers,
            )
            self._prepare_database()
            try:
                stack.enter_context(DEMO)
            except AcquireTimeoutError as error:
                raise CommandError(f"Another demo uses this database. {error}") from error
            meter.reset()
            try:
                with self._children() as children, self._bustle(children):
                    if not self.stopped.is_set():
                        self._fight(children)
            except ChildError as error:
                raise CommandError(str(error)) from error
        self._conclude()

    # Before -------------------------------------------------------------------------------------------------

    @contextmanager
    def _only_one_here(self) -> Iterator[None]:
        with (self.folder / "demo.lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise CommandError(
                    f"Another demo is running in {self.folder} (process {file.read().strip()}). "
                    "Stop it first, or give this one a folder of its own with EXAMPLE_VAR_DIR."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @contextmanager
    def _signals(self) -> Iterator[None]:
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: self.stopped.set()) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _port(self, wanted: int | None) -> int:
        if is_free(wanted or DEFAULT_PORT):
            return wanted or DEFAULT_PORT
        if wanted:
            raise CommandError(f"Port {wanted} of {HOST} is taken.")
        return free_port()

    def _prepare_database(self) -> None:
        call_command("migrate", verbosity=0, interactive=False)
        users = get_user_model()
        if not users.objects.filter(username="admin").exists():
            users.objects.create_superuser("admin", "admin@example.invalid", "admin")

    # The fight ----------------------------------------------------------------------------------------------

    @contextmanager
    def _children(self) -> Iterator[list[Child]]:
        folder: Path = settings.BASE_DIR
        app.control.purge()  # what an earlier run left
        web = ["uvicorn", "example_project.asgi:application", "--host", HOST, "--port", str(self.port)]
        web += ["--workers", str(self.workers), "--lifespan", "off", "--no-access-log", "--log-level", "warning"]
        web += ["--timeout-graceful-shutdown", "5"]
        tasks = [
            "celery",
            "-A",
            "example_project",
            "worker",
            "--concurrency",
            str(self.workers),
            "-n",
            "demo@localhost",
        ]
        tasks += ["--loglevel", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        children: list[Child] = []
        try:
            children.append(Child("The web server", web, folder=folder, log=self.folder / "web.log"))
            children.append(Child("The Celery worker", tasks, folder=folder, log=self.folder / "tasks.log"))
            children[0].wait_until(self._answers, self.stopped.wait)
            children[1].wait_until(lambda: "ready." in children[1].tail(1000), self.stopped.wait)
            yield children
        finally:
            self.load.stop()
            for child in reversed(children):
                child.terminate()
            for child in children:
                child.wait()

    @contextmanager
    def _bustle(self, children: list[Child]) -> Iterator[None]:
        """Beside the fight: a busy site, and a process that crashes now and then."""
        children.append(self._child("The busy site", "bustle.log"))
        crashes = threading.Thread(target=self._crash, name="crashes")
        crashes.start()
        try:
            yield
        finally:
            self.stopped.set()
            crashes.join()

    def _child(self, name: str, log: str, *arguments: str) -> Child:
        program = ["example_project.demo.bustle", *arguments]
        return Child(name, program, folder=settings.BASE_DIR, log=self.folder / log)

    def _crash(self) -> None:
        """Kill a holder, see that its slot comes back, and begin anew."""
        while not self.stopped.wait(SECONDS_TO_CRASH / 3):
            victim = self._child("The victim", "victim.log", "victim")
            self.stopped.wait(SECONDS_TO_CRASH)
            victim.kill()

    def _answers(self) -> bool:
        try:
            return get(self.port, "/", timeout=5) == 200
        except OSError:
            return False

    def _fight(self, children: list[Child]) -> None:
        self._introduce()
        self.load.start()
        start = time.monotonic()
        while not self.stopped.wait(self._pause(time.monotonic() - start)):
            elapsed = time.monotonic() - start
            self.slots = max(self.slots, REPORTS.status().slots)  # an operator may set another number meanwhile
            self._show(elapsed)
            for child in children:
                child.check()
            if self.seconds is None and elapsed > SECONDS_BEFORE_CALM and not self.load.calm:
                self.load.calm = True
                self.stdout.write("\nFrom now on work takes longer: look around in the admin. Ctrl-C ends it.")
            if self.seconds is not None and elapsed >= self.seconds:
                break
        if not self.seconds:
            self.stdout.write("\nStopping: the requests and tasks under way may finish.")

    def _pause(self, elapsed: float) -> float:
        return 1.0 if self.seconds is None else max(0.0, min(1.0, self.seconds - elapsed))

    # What is printed ----------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        site = f"http://{HOST}:{self.port}"
        processes = "process" if self.workers == 1 else "processes"
        self.stdout.write(
            f"{self.workers} web {processes} and {self.workers} task {processes} fight for {SLOTS} slots"
            f" on {connection.display_name}.\n\n"
            f"  the locks    {site}{reverse('admin:sqlsem_semaphorerow_changelist')}   user admin, password admin\n"
            f"  start page   {site}/\n"
            f"  logs         {self.folder}/*.log\n\n"
            f"Beside them a busy site: queues, a lock for each user, a paused name, readers and a writer, a\n"
            "deadlock that is broken, a process that crashes and whose lock comes back.\n"
        )

    def _show(self, elapsed: float) -> None:
        self.now = now = meter.read()
        results = self.load.results
        line = (
            f"{elapsed:4.0f} s   in now {now.inside}   peak {now.peak}   served {results['served'] + now.finished}"
            f"   busy {results['busy']}   retried {now.retried}"
        )
        if self.stdout.isatty():
            self.stdout.write(f"\r\x1b[K{line}", ending="")
        else:
            self.stdout.write(line)
        self.stdout.flush()

    def _conclude(self) -> None:
        now = meter.read()
        results = self.load.results
        served = results["served"] + now.finished
        slots = self.slots or SLOTS
        problems = []
        if now.peak > slots:
            problems.append(f"{now.peak} were in at once, which is more than the {slots} slots.")
            if now.lost:
                problems.append(f"{now.lost} permits were revoked or lost while their work went on: it may be that.")
        if not served:
            problems.append("Nothing was served.")
        if failed := results["failed"]:
            problems.append(f"{failed} requests failed, the first: {self.load.error}. See {self.folder}/web.log.")
        if now.failed:
            problems.append(f"{now.failed} tasks failed. See {self.folder}/tasks.log.")
        if self.stdout.isatty():
            self.stdout.write("")
        for problem in problems:
            self.stderr.write(self.style.ERROR(problem))
        self.stdout.write(
            f"at most {now.peak} of {slots} at once, {served} served, {results['busy']} busy, {now.retried} retried"
        )
        self.stdout.flush()
        if problems:
            raise SystemExit(1)
