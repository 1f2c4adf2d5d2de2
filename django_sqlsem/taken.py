"""The permit of one decorated call."""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Self

from django.http.response import HttpResponseBase

from django_sqlsem import streams
from django_sqlsem.calls import Call, timeout_for
from django_sqlsem.clients import client_of
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.ranks import ranked
from django_sqlsem.transactions import at_transaction_end

if TYPE_CHECKING:
    from django.http import HttpRequest

    from django_sqlsem.permits import Permit
    from django_sqlsem.semaphores import Semaphore


class Taken:
    """The permit of one call, until the call ends or leaves it to someone else. Nothing that strikes keeps it held."""

    def __init__(self, late: bool = False) -> None:
        self.permit: Permit | None = None
        self.left: Permit | None = None
        self.late = late
        #: Why there is no permit. It is kept here alone: if it is raised, its traceback keeps the frames it passes.
        self.refusal: AcquireTimeoutError | None = None

    def acquire(self, semaphore: Semaphore, call: Call) -> bool:
        """Take a permit, or note why there is none. Return whether there is one."""
        try:
            semaphore = ranked(semaphore, call)
            timeout = timeout_for(semaphore, call)
            client = client_of(call) if timeout != 0 else None
            if client is None:
                self.permit = semaphore.acquire(timeout=timeout)
            else:
                self.permit = dataclasses.replace(semaphore, client=client).acquire(timeout=timeout)
                client.check(semaphore.name)  # granted at the very moment of leaving: it goes back
        except AcquireTimeoutError as error:
            self.refusal = error
        return self.refusal is None

    async def aacquire(self, semaphore: Semaphore, call: Call) -> bool:
        """Take a permit, or note why there is none. Return whether there is one."""
        try:
            semaphore = ranked(semaphore, call)
            self.permit = await semaphore.aacquire(timeout=timeout_for(semaphore, call))
        except AcquireTimeoutError as error:
            self.refusal = error
        return self.refusal is None

    def leave_to_stream(self, response: Any, request: HttpRequest | None) -> None:
        """If the response is a stream, let the permit be given back when it, or what replaces it, is closed."""
        if self.permit is not None and isinstance(response, HttpResponseBase) and response.streaming:
            streams.leave_to(response, self.permit, request)
            self._leave(self.permit)

    def leave_to_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Let the coroutine that a plain function has returned give the permit back at its end."""

        async def finish(taken: Taken) -> Any:
            async with taken:
                return await coroutine

        heir = Taken()
        heir.permit = self.permit
        if self.permit is not None:
            self._leave(self.permit)
        return finish(heir)

    def _leave(self, permit: Permit) -> None:
        permit.detach()
        self.left, self.permit = permit, None

    def abandon(self) -> None:
        """Something struck on the way to giving back, or handing over: leave the permit to the keeper."""
        permit = self.permit or self.left
        if permit is not None:
            permit._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.refusal = None
        if self.permit is not None:
            if self.late:
                at_transaction_end(None, self.permit._close)
            else:
                self.permit._finish()
            self.permit = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.refusal = None
        if self.permit is not None:
            await self.permit._afinish()
            self.permit = None
