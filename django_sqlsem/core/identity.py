"""Who is asking: the host, process, thread and piece of work behind a permit."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
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


def current() -> HolderIdentity:
    """Return the identity of the calling thread and of the work it does."""
    doing = _activity.get()
    label = doing.label if doing else ""
    if not label:
        for module, ask in task_labels.items():
            if module in sys.modules and (found := ask()):
                label = found
                break
        else:
            label = _command_line()
    return _identity(os.getpid(), threading.current_thread().name, label, doing.user if doing else "", _process_id)


@functools.lru_cache(maxsize=256)
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


#: ``task.name[task-id]``, and ``GET /path [trace-id]``: what ``contrib`` and ``decorators`` make labels of.
_OF_TASK: Final = re.compile(r"(?P<task>[^\[\]\s]+)\[(?P<task_id>[^\[\]\s]+)\]")
_OF_REQUEST: Final = re.compile(r"[A-Z]+ /.* \[(?P<trace_id>[\w.:/+=-]+)\]")


def ids_of(label: str) -> dict[str, str]:
    """Return the ids that a label tells: ``task`` and ``task_id`` of a task, ``trace_id`` of a request."""
    found = _OF_TASK.fullmatch(label) or _OF_REQUEST.fullmatch(label)
    return found.groupdict() if found else {}


def request_label(method: str, path: str, trace_id: str = "") -> str:
    """Return how operators are shown a request: ``GET /path``, with its trace or request id if that is known."""
    if not trace_id:
        return f"{method} {path}"
    return f"{method} {path[: MAX_LABEL_LENGTH - len(method) - len(trace_id) - 4]} [{trace_id}]"


#: By the library that traces: what returns the id of the trace that runs, or nothing. ``contrib`` registers them.
trace_ids: dict[str, Callable[[], str]] = {}

#: By the module without which there is nothing to ask: what returns how operators are shown the running task, or
#: nothing. ``contrib`` registers them.
task_labels: dict[str, Callable[[], str]] = {}


#: One of Python's own options, or several in one word; which of them takes a value, and the value if it stands there.
_OPTION: Final = re.compile(r"-(?:-.*|[^-cmWX]*(?:([cmWX])(.*))?)", re.DOTALL)


@functools.cache
def _command_line() -> str:
    arguments = sys.orig_argv[1:]
    while arguments and (option := _OPTION.fullmatch(arguments[0])):
        takes, given = option[1], option[2]
        if takes == "c":  # not the source
            return "-c"
        if takes == "m":
            return f"-m {given or ''.join(arguments[1:2])}"
        arguments = arguments[2 if takes and not given else 1 :]
    return command_label(arguments) if arguments else ""


#: What a first word may look like that names what a command does, and is no address with a password in it.
_WORD: Final = re.compile(r"[\w./-]+")


def command_label(command: Sequence[str]) -> str:
    """Return a command's name and its first word: what follows may be a password, and many may see labels."""
    name, words = os.path.basename(command[0]), command[1:2]
    return " ".join([name, *(word for word in words if not word.startswith("-") and _WORD.fullmatch(word))])
