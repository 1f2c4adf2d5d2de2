"""The client of a view that waits: one that has gone need not be waited for any longer.

A WSGI server may put into ``environ`` what tells whether the connection stands. It is looked at about twice a second,
and nothing is ever read from it. Under ASGI, Django cancels a request whose client has gone; a synchronous view, which
runs in a thread, waits on the request's own event loop, so that the cancellation reaches it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import select
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

import asgiref
from asgiref.sync import SyncToAsync, async_to_sync
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.utils.version import get_version_tuple

from django_sqlsem.core.clocks import boot_now
from django_sqlsem.decorators.calls import Call
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.runtime.acquisition import Client, Reply

logger = logging.getLogger("django_sqlsem")

#: How often a waiting view looks whether its client is there, in seconds.
CLIENT_LOOK_EVERY: Final = 0.5
#: The status that such a view "answers": nginx's for a client that has closed the connection.
CLIENT_GONE: Final = 499
#: Before, the end of a request could block the event loop until its thread was done, which must not wait for the loop.
_LOOP_STAYS_FREE: Final = get_version_tuple(asgiref.__version__) >= (3, 12, 1)


class ClientGoneError(AcquireTimeoutError, BadRequest):
    """The client had gone before a slot became free."""


class WatchedClient:
    """The client of a WSGI server: ``is_gone()`` looks at its connection."""

    def __init__(self, call: Call, is_gone: Callable[[], bool]) -> None:
        self._label = call.label
        self._is_gone = is_gone
        self._gone = False

    def wait(self, answer: Reply, timeout: float | None) -> bool:
        """Block until there is an answer, and look after the client meanwhile: first of all before that."""
        until = None if timeout is None else boot_now() + timeout
        while not self._left():
            remaining = CLIENT_LOOK_EVERY if until is None else until - boot_now()
            if answer.wait_here(max(0.0, min(CLIENT_LOOK_EVERY, remaining))):
                return True
            if remaining <= 0:
                return False
        return False

    def check(self, name: str) -> None:
        if self._gone:
            _log(self._label, name, "its client has gone")
            raise ClientGoneError(name=name)

    def _left(self) -> bool:
        self._gone = self._gone or self._is_gone()
        return self._gone


class CancelledClient:
    """The client of a synchronous view under ASGI: a cancellation of the request ends the wait."""

    def __init__(self, call: Call) -> None:
        self._label = call.label
        self._cancelled: asyncio.CancelledError | None = None

    def wait(self, answer: Reply, timeout: float | None) -> bool:
        if self._cancelled is None:
            try:
                return bool(async_to_sync(answer.wait_on_loop)(timeout))
            except asyncio.CancelledError as error:
                self._cancelled = error
        return False

    def check(self, name: str) -> None:
        """Go on with the cancellation, and log that, if there was one."""
        error, self._cancelled = self._cancelled, None
        if error is not None:
            _log(self._label, name, "its request was cancelled, as when the client has gone")
            try:
                raise error
            finally:
                del error  # its traceback keeps this frame


def client_of(call: Call) -> Client | None:
    """Return the client of a view's call; ``None`` where nothing tells whether it is there."""
    request = call.request
    if request is None:
        return None
    environ = getattr(request, "environ", None)
    if environ is not None:
        is_gone = _test_for(environ)
        return None if is_gone is None else WatchedClient(call, is_gone)
    if not hasattr(request, "scope") or not _LOOP_STAYS_FREE:
        return None
    # By the thread: a view that runs in the loop's own is asynchronous, or must not wait at all.
    loop = getattr(SyncToAsync.threadlocal, "main_event_loop", None)
    return CancelledClient(call) if loop is not None and loop.is_running() else None


def gone_response(request: HttpRequest) -> HttpResponse:
    """Return what a view answers whose client has gone: it is not read, and not logged."""
    response = HttpResponse(status=CLIENT_GONE, headers={"Cache-Control": "no-store"})
    response._has_been_logged = True  # type: ignore[attr-defined]  # what Django's log_response() looks at
    return response


def _test_for(environ: dict[str, Any]) -> Callable[[], bool] | None:
    for key in ("gunicorn.socket", "werkzeug.socket"):
        if (connection := environ.get(key)) is not None:
            return functools.partial(is_closed, connection)
    if callable(disconnected := environ.get("waitress.client_disconnected")):
        return lambda: bool(disconnected())
    if "uwsgi.version" in environ and (uwsgi := sys.modules.get("uwsgi")) is not None:
        # Its own is_connected() sees errors only, and not that the client has closed the connection.
        return functools.partial(is_closed, uwsgi.connection_fd())
    return None


def is_closed(connection: Any) -> bool:
    """Whether the other side of a socket, or of the file descriptor of one, sends no more. It is not read from.

    Bytes of a next request are no end. One that has closed only its own direction counts as gone. ``False`` if it
    cannot be told.
    """
    number = connection if isinstance(connection, int) else getattr(connection, "fileno", lambda: -1)()
    if number < 0:
        return False
    system = _select()
    if not hasattr(system, "poll") or not hasattr(system, "POLLRDHUP"):
        return _ends_at_once(connection)
    poll = system.poll()
    poll.register(number, system.POLLRDHUP)
    gone = system.POLLRDHUP | system.POLLHUP | system.POLLERR
    return any(events & gone for _number, events in poll.poll(0))


def _ends_at_once(connection: Any) -> bool:
    try:
        if isinstance(connection, int) or not _select().select([connection], [], [], 0)[0]:
            return False
        return not connection.recv(1, socket.MSG_PEEK)
    except ValueError:  # TLS has no peeking
        return False
    except OSError:
        return True


def _select() -> Any:
    """Return the system's own module: that of gevent or eventlet would let others run, or knows less."""
    if (gevent := sys.modules.get("gevent.monkey")) is not None and gevent.is_module_patched("select"):
        names = ("poll", "select", "POLLRDHUP", "POLLHUP", "POLLERR")
        found = {name: gevent.get_original("select", name) for name in names if hasattr(select, name)}
        return type("select", (), {name: staticmethod(one) if callable(one) else one for name, one in found.items()})
    if (eventlet := sys.modules.get("eventlet.patcher")) is not None:
        return eventlet.original("select")
    return select


def _log(label: str, name: str, why: str) -> None:
    logger.info(
        "%s no longer waits for a slot of %r: %s.",
        label.encode("unicode_escape").decode("ascii"),  # as Django does: a path may hold line breaks
        name,
        why,
        extra={"semaphore": name, "what": "client_gone"},
    )
