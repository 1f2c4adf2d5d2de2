"""``locks doctor``: the system checks, what each database says when it is asked, and live trials.

The trials: an acquire and a release, and a slot whose holder is killed, under names of the doctor's own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final

from django.conf import settings
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured

from django_sqlsem import checks, mutex, queries
from django_sqlsem.backends import get_backend
from django_sqlsem.checks import servers, sqlserver
from django_sqlsem.checks.messages import error, note, ok, warning
from django_sqlsem.checks.servers import Server, milliseconds
from django_sqlsem.exceptions import SemaphoreError

#: The lease of the child that is killed, in seconds: well above what a beacon takes to be found out.
LEASE: Final = 15.0
#: A slot that comes back earlier than this did not come back with the lease.
EARLY: Final = 0.75 * LEASE
#: What the child does: it takes the slot, says so, and holds it until its input ends, as it does if the doctor dies.
CHILD: Final = """
import sys
import django
django.setup()
from django_sqlsem import mutex
alias, name, lease = sys.argv[1:]
with mutex(name, timeout=20, lease=float(lease), using=alias):
    print("held", flush=True)
    sys.stdin.read()
"""
#: How long the child may take to start and to get its slot, in seconds.
CHILD_PATIENCE: Final = 30.0


def examine(using: str | None = None, *, acquire: bool = True) -> Iterator[CheckMessage]:
    """Yield what is found, as it is found: about the settings, and about ``using`` or all aliases that keep locks.

    A message about a database has the alias as its ``obj``. ``acquire``: whether locks are taken, and a child process
    is killed, for the sake of it. Nothing else is written.
    """
    found = [message for check in checks.STATIC for message in check(None) if not message.is_silenced()]
    yield from found or [ok("D000", "The system checks have nothing to say about the settings.")]
    for alias in [using] if using else sqlserver.named():
        for message in servers.examine(alias, trials=(take, crash) if acquire else ()):
            message.obj = alias
            if not message.is_silenced():
                yield message


@contextlib.contextmanager
def _own_name(alias: str) -> Iterator[str]:
    """Yield a name of its own, and delete it afterwards, once it is free."""
    name = f"sqlsem:doctor:{uuid.uuid4().hex}"
    try:
        yield name
    finally:
        give_up = time.monotonic() + 5.0
        with contextlib.suppress(SemaphoreError):
            while queries.semaphore(name, using=alias) and time.monotonic() < give_up:
                if get_backend(alias).purge_idle(name):
                    break
                time.sleep(0.05)


def take(server: Server) -> Iterator[CheckMessage]:
    """Take a lock and give it back, a few times, and say how long that takes."""
    with _own_name(server.alias) as name:
        took = []
        try:
            for _ in range(5):
                started = time.perf_counter()
                with mutex(name, timeout=10, using=server.alias):
                    pass
                took.append(time.perf_counter() - started)
        except (SemaphoreError, ImproperlyConfigured) as failed:
            yield error("D016", f"A lock could not be taken: {failed}", "Nothing works until that does.")
            return
    text = f"A lock was taken and given back in {milliseconds(min(took[1:]))}, at first in {milliseconds(took[0])}."
    yield ok("D016", text)


def crash(server: Server) -> Iterator[CheckMessage]:
    """Have a child take a lock, kill it, and say how long its lock stays taken."""
    if not _settings_module():
        yield note("D017", "No holder was killed: the settings have no module that a child could load.")
        return
    with _own_name(server.alias) as name:
        child = _victim(server.alias, name)
        try:
            if _first_line(child) != "held":
                child.kill()
                told = (child.communicate(timeout=10)[1] or "").strip().splitlines()
                text = f"No holder was killed: the child did not get a lock ({told[-1] if told else 'no answer'})."
                yield warning("D017", text, "It runs this Python with the same settings and environment.")
                return
            if (seen := queries.semaphore(name, using=server.alias)) is None or not seen.held:
                text = "A child with the same settings took a lock, and nothing of it is seen here."
                yield error("D017", text, "Processes do not share a database: look at how NAME is made.")
                return
            child.kill()
            child.wait(10)
            killed = time.monotonic()
            with mutex(name, timeout=LEASE + 20, using=server.alias):
                took = time.monotonic() - killed
        except SemaphoreError as failed:
            yield error("D017", f"The slot of a killed process did not come back: {failed}", "Report this.")
            return
        finally:
            child.kill()
            child.communicate()
    yield _judged(server, took)


def _judged(server: Server, took: float) -> CheckMessage:
    lease = server.config.lease
    backend = get_backend(server.alias)
    if took < EARLY or backend.released_on_disconnect:
        return ok("D017", f"The slot of a killed process came back after {milliseconds(took)}.")
    why = f", as {' and '.join(server.no_beacons)}" if server.no_beacons else ""
    if not server.config.beacons:
        why = ", as BEACONS is off"
    text = f"The slot of a killed process came back with its lease only{why}. With yours that takes up to {lease:g} s."
    if server.config.beacons and not server.no_beacons:
        return warning("D017", text, "The log says why there is no beacon. A shorter LEASE helps meanwhile.")
    return note("D017", text, "A shorter LEASE makes that faster, and short outages of the database dangerous.")


def _settings_module() -> str:
    return getattr(settings, "SETTINGS_MODULE", None) or os.environ.get("DJANGO_SETTINGS_MODULE", "")


def _victim(alias: str, name: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": _settings_module(),
        "PYTHONPATH": os.pathsep.join(path for path in [*sys.path, os.getcwd()] if path),
    }
    return subprocess.Popen(  # noqa: S603 - this very Python
        [sys.executable, "-c", CHILD, alias, name, str(LEASE)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _first_line(child: subprocess.Popen[str]) -> str:
    """Return the child's first line, or nothing if none comes in time. A project may print lines of its own."""
    assert child.stdout is not None  # noqa: S101
    timer = threading.Timer(CHILD_PATIENCE, child.kill)
    timer.start()
    try:
        for line in child.stdout:
            if line.strip() == "held":
                return "held"
        return ""
    finally:
        timer.cancel()
