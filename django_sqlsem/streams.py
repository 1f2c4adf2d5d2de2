"""Streaming responses that give a permit back at their end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

from django.http import FileResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from django.http import HttpRequest

    from django_sqlsem.permits import Permit

#: The task in which Django's handler for ASGI runs asynchronous views and sends their responses.
_HANDLER: Final = "ASGIHandler.handle.<locals>.process_request"


def leave_to(response: Any, permit: Permit, request: HttpRequest | None = None) -> None:
    """Have a streaming response give the permit back when it is closed, when it fails half-way, or when it is dropped.

    A middleware may drop it without closing it: Django's own does so for a 304. Whichever response is sent at last
    closes the request at its own end. Django's handler for ASGI closes neither a stream that has failed, nor one whose
    client has left before the first byte. Some of these are on cycles of references until the garbage is collected.
    """
    if not isinstance(response, FileResponse):  # of which WSGI's servers may take the file itself
        # Not through the property, whose iterators refer to the response: it would be on a cycle.
        response._iterator = (_Parts if response.is_async else _SyncParts)(response._iterator, permit)
    end = _End(permit)
    response._resource_closers.append(end)
    if request is not None:
        _close_with(request, end)
    with contextlib.suppress(RuntimeError):  # no event loop runs here
        task = asyncio.current_task()
        if task is not None and getattr(task.get_coro(), "__qualname__", "") == _HANDLER:
            task.add_done_callback(functools.partial(_handled, weakref.ref(response), permit))


def _close_with(request: Any, end: _End) -> None:
    # The request refers to the end weakly: a request whose user is known is on a cycle of its own.
    followed, itself, before = weakref.ref(end), weakref.ref(request), vars(request).get("close")

    def close() -> None:
        try:
            if (end := followed()) is not None:
                end()
        finally:
            if before is not None:  # of another stream's
                before()
            elif (request := itself()) is not None:
                type(request).close(request)

    request.close = close


def _handled(response: weakref.ref[Any], permit: Permit, task: asyncio.Task[Any]) -> None:
    # Not by exception(), which would count as somebody having looked at it.
    failed = task.cancelled() or getattr(task, "_exception", None) is not None
    if (failed or task.result() is not response()) and not permit.released:
        permit._abandon()  # Django has nothing left to close


class _Parts:
    """The parts of an asynchronous stream."""

    def __init__(self, parts: AsyncIterator[Any], permit: Permit) -> None:
        self.parts = parts
        self.permit = permit

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self.parts)
        except StopAsyncIteration:
            raise
        except Exception:
            await self.permit._aclose()
            raise


class _SyncParts:
    """The parts of a synchronous stream."""

    def __init__(self, parts: Iterator[Any], permit: Permit) -> None:
        self.parts = parts
        self.permit = permit

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.parts)
        except StopIteration:
            raise
        except Exception:
            self.permit._close()
            raise


class _End:
    """Closes the permit with the response. A response that is dropped is nobody's fault, so that nothing is logged."""

    def __init__(self, permit: Permit) -> None:
        self.permit = permit

    def __call__(self) -> None:
        self.permit._close()

    def __del__(self) -> None:
        if not self.permit.released:
            self.permit._abandon()  # only a note for the keeper: a finaliser may run at any point
