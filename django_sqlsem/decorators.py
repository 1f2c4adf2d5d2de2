"""Decorated functions: one permit per call, whatever kind of function and of call it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from asgiref.sync import sync_to_async
from django.http.response import HttpResponseBase

from django_sqlsem import atomic_requests
from django_sqlsem.busy import Busy, busy_response, log_busy, log_busy_response
from django_sqlsem.call_names import CallName, describe
from django_sqlsem.calls import Call, Kind, classify, policy_for, retry_task, timeout_for
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.targets import is_async_dispatch, is_coroutine_function, refuse, refuse_skipped_view
from django_sqlsem.transactions import at_transaction_end

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    from django_sqlsem.permits import Permit
    from django_sqlsem.semaphores import Semaphore

F = TypeVar("F", bound="Callable[..., Any]")


def decorate(semaphore: Semaphore, func: F) -> F:
    """Return ``func`` so that each call of it holds a permit of ``semaphore``.

    Functions, methods, coroutine functions and both kinds of generator functions keep their kind, signature and
    attributes. Raises ``TypeError`` for what can't be decorated, and ``ValueError`` for a name with a field that no
    call could fill in.
    """
    descriptor: Any = type(func)
    if issubclass(descriptor, (staticmethod, classmethod)):
        return cast("F", descriptor(decorate(semaphore, cast("Any", func).__func__)))
    refuse(semaphore, func)
    decorated = _Decorated(semaphore, func)
    if inspect.isasyncgenfunction(func):
        wrapper = decorated.async_generator()
    elif inspect.isgeneratorfunction(func):
        wrapper = decorated.generator()
    elif is_coroutine_function(func):
        wrapper = decorated.coroutine()
    else:
        wrapper = decorated.function()
        atomic_requests.opt_out(wrapper, func)
    describe(wrapper, func)
    return cast("F", wrapper)


class _Decorated:
    """A semaphore and the function that it decorates. Calls leave no trace here."""

    def __init__(self, semaphore: Semaphore, func: Callable[..., Any]) -> None:
        self.semaphore = semaphore
        self.func = func
        self.names = CallName(semaphore.name, semaphore.key, func)

    def function(self) -> Callable[..., Any]:
        """Wrap a function, or a view."""

        @functools.wraps(self.func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = classify(wrapper, args)
            if call.kind is Kind.VIEW and is_async_dispatch(self.func, args):
                return self._acall(wrapper, call, args, kwargs)
            return self._call(wrapper, call, args, kwargs)

        return wrapper

    def coroutine(self) -> Callable[..., Any]:
        """Wrap a coroutine function, or an asynchronous view."""

        @functools.wraps(self.func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await self._acall(wrapper, classify(wrapper, args), args, kwargs)

        return wrapper

    def generator(self) -> Callable[..., Any]:
        """Wrap a generator function: the permit is taken at the first item, and held until the last."""

        @functools.wraps(self.func)
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            call, taken = Call(Kind.PLAIN), _Taken()
            try:
                with taken:
                    refusal = taken.acquire(self._named(args, kwargs), call)
                    if refusal is not None:
                        return self._answer(call, refusal)
                    return (yield from self.func(*args, **kwargs))
            except BaseException:
                taken.abandon()
                raise

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        """Wrap an asynchronous generator function: the permit is taken at the first item, and held until the last."""

        @functools.wraps(self.func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            call, taken = Call(Kind.PLAIN), _Taken()
            try:
                async with taken:
                    refusal = await taken.aacquire(await self._anamed(args, kwargs), call)
                    if refusal is not None:
                        await self._aanswer(call, refusal)
                        return
                    async with contextlib.aclosing(self.func(*args, **kwargs)) as inner:
                        step = inner.__anext__()
                        while True:
                            try:
                                item = await step
                            except StopAsyncIteration:
                                return
                            try:
                                sent = yield item
                            except GeneratorExit:
                                raise
                            except BaseException as error:  # noqa: BLE001 - what is thrown in is the generator's
                                step = inner.athrow(error)
                            else:
                                step = inner.asend(sent)
            except BaseException:
                taken.abandon()
                raise

        return wrapper

    # A call, synchronous and asynchronous.

    def _call(self, wrapper: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        aliases, late = self._transactions(wrapper, call)
        semaphore, taken = self._named(args, kwargs), _Taken(late)
        try:
            with call.activity(), taken:
                refusal = taken.acquire(semaphore, call)
                if refusal is not None:
                    return self._answer(call, refusal)
                with atomic_requests.atomic(aliases):
                    result = self.func(*args, **kwargs)
                if inspect.iscoroutine(result):
                    return taken.leave_to_coroutine(result)
                if call.kind is Kind.VIEW:
                    taken.leave_to_stream(result)
                return result
        except BaseException:
            taken.abandon()
            raise

    async def _acall(
        self, wrapper: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        aliases, _ = self._transactions(wrapper, call)
        if aliases:
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")  # in Django's own words
        semaphore, taken = await self._anamed(args, kwargs), _Taken()
        try:
            with call.activity():
                async with taken:
                    refusal = await taken.aacquire(semaphore, call)
                    if refusal is not None:
                        return await self._aanswer(call, refusal)
                    result = self.func(*args, **kwargs)
                    if inspect.isawaitable(result):
                        result = await result
                    if call.kind is Kind.VIEW:
                        taken.leave_to_stream(result)
                    return result
        except BaseException:
            taken.abandon()
            raise

    def _transactions(self, wrapper: Callable[..., Any], call: Call) -> tuple[list[str], bool]:
        """Which transactions the call must open, and whether one is open that the permit must outlast."""
        if call.request is None:
            return [], False
        refuse_skipped_view(self.semaphore, self.func)
        aliases = atomic_requests.aliases_to_open(wrapper, self.func, call.request)
        return aliases, atomic_requests.opened_by_handler(self.func, call.request)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        name = self.names.name(args, kwargs)
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    async def _anamed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        name = await self.names.aname(args, kwargs)
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    def _answer(self, call: Call, refusal: AcquireTimeoutError) -> Any:
        return self._logged(call, refusal, self._decide(call, refusal))

    async def _aanswer(self, call: Call, refusal: AcquireTimeoutError) -> Any:
        if call.request is not None and not callable(self.semaphore.on_busy):
            # In a thread, because a project's own page and context processors may make queries.
            answer = await sync_to_async(self._decide)(call, refusal)
        else:
            answer = self._decide(call, refusal)
            if inspect.isawaitable(answer):
                answer = await answer
        return self._logged(call, refusal, answer)

    def _decide(self, call: Call, refusal: AcquireTimeoutError) -> Any:
        policy, about = policy_for(self.semaphore, call), Busy.from_error(refusal)
        if callable(policy):
            return policy(about)
        if policy == "raise":
            raise refusal
        if policy == "retry":
            retry = retry_task(call.task, about.retry_after, refusal)
            log_busy(about, call.label, "is sent again for later")
            raise retry
        return None if call.request is None else busy_response(about, call.request, policy)

    def _logged(self, call: Call, refusal: AcquireTimeoutError, answer: Any) -> Any:
        about = Busy.from_error(refusal)
        if call.request is not None and isinstance(answer, HttpResponseBase):
            log_busy_response(about, call.request, answer)
        else:
            work = call.label or getattr(self.func, "__qualname__", repr(self.func))
            log_busy(about, work, "was left to on_busy" if callable(self.semaphore.on_busy) else "was skipped")
        return answer


class _Taken:
    """The permit of one call, until the call ends or leaves it to someone else. Nothing that strikes keeps it held."""

    def __init__(self, late: bool = False) -> None:
        self.permit: Permit | None = None
        self.left: Permit | None = None
        self.late = late

    def acquire(self, semaphore: Semaphore, call: Call) -> AcquireTimeoutError | None:
        """Take a permit, or return why there is none."""
        try:
            self.permit = semaphore.acquire(timeout=timeout_for(semaphore, call))
        except AcquireTimeoutError as error:
            return error
        return None

    async def aacquire(self, semaphore: Semaphore, call: Call) -> AcquireTimeoutError | None:
        """Take a permit, or return why there is none."""
        try:
            self.permit = await semaphore.aacquire(timeout=timeout_for(semaphore, call))
        except AcquireTimeoutError as error:
            return error
        return None

    def leave_to_stream(self, response: Any) -> None:
        """If the response is a stream, let it give the permit back when it is closed."""
        if self.permit is not None and isinstance(response, HttpResponseBase) and response.streaming:
            response._resource_closers.append(self.permit._close)  # type: ignore[attr-defined]
            self._leave(self.permit)

    def leave_to_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Let the coroutine that a plain function has returned give the permit back at its end."""

        async def finish(taken: _Taken) -> Any:
            async with taken:
                return await coroutine

        heir = _Taken()
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
        if self.permit is not None:
            if self.late:
                at_transaction_end(None, self.permit._close)
            else:
                self.permit._finish()
            self.permit = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.permit is not None:
            await self.permit._afinish()
            self.permit = None
