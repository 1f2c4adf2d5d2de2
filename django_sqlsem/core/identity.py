"""Who is asking: the host, process, thread and piece of work behind a permit."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from django_sqlsem.core import forks

MAX_LABEL_LENGTH: Final = 200
MAX_USER_LENGTH: Final = 150


@dataclass(frozen=True, slots=True)
class HolderIdentity:
    """Who holds or waits: what an operator needs to find the program and the work it does."""

    host: str
    pid: int
    thread: str
    label: str
    user: str
    process: str


@dataclass(frozen=True, slots=True)
class Activity:
    """The piece of work that a decorator is running: a request or a task."""

    label: str
    user: str = ""


_activity: contextvars.ContextVar[Activity | None] = contextvars.ContextVar("sqlsem_activity", default=None)
_process_id = uuid.uuid4().hex


@contextlib.contextmanager
def activity(label: str, user: str = "") -> Iterator[None]:
    """Label every permit taken inside with this request or task and its user."""
    reset = _activity.set(Activity(label, user))
    try:
        yield
    finally:
        _activity.reset(reset)


def process_id() -> str:
    """A random name of this process; a forked child has its own."""
    return _process_id


def _rename() -> None:
    global _process_id
    _process_id = uuid.uuid4().hex


forks.register("identity", "parent and child would pass for one process, and free each other's slots", in_child=_rename)


def printable(text: str, length: int) -> str:
    """Return ``text`` in a form that every database can store: no NUL, no lone surrogate, cut to ``length``."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")[:length]


def current(label: str = "") -> HolderIdentity:
    """Return the identity of the calling thread and of the work it does."""
    doing = _activity.get()
    label = label or (doing.label if doing else "")
    if not label:
        asked = (ask() for module, ask in task_labels.items() if module in sys.modules)
        label = next(filter(None, asked), "") or _command_line()
    return _identity(os.getpid(), threading.current_thread().name, label, doing.user if doing else "", _process_id)


@functools.lru_cache(maxsize=1024)
def _identity(pid: int, thread: str, label: str, user: str, process: str) -> HolderIdentity:
    return HolderIdentity(
        host=_host(),
        pid=pid,
        thread=printable(thread, 100),
        label=printable(label, MAX_LABEL_LENGTH),
        user=printable(user, MAX_USER_LENGTH),
        process=process,
    )


@functools.cache
def _host() -> str:
    return printable(socket.gethostname(), 255)


#: By the module without which there is nothing to ask: what returns how operators are shown the running task, or
#: nothing. ``contrib`` registers them.
task_labels: dict[str, Callable[[], str]] = {}


@functools.cache
def _command_line() -> str:
    # Up to the first option: what follows may be a password.
    arguments = sys.orig_argv[1:]
    words = list(itertools.takewhile(lambda part: not part.startswith("-"), arguments)) or arguments[:2]
    return " ".join([os.path.basename(words[0]), *words[1:]]) if words else ""
