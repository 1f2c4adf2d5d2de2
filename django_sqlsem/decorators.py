"""Decorated functions: one permit per call, whatever kind of function and of call it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asgiref.sync import sync_to_async
from django.http.response import HttpResponseBase

from django_sqlsem import atomic_requests
from django_sqlsem.busy import Busy
from django_sqlsem.busy_answers import answer_view, refuse_answer
from django_sqlsem.busy_log import log_busy, log_busy_response
from django_sqlsem.call_names import CallName, describe
from django_sqlsem.calls import Call, Kind, SentAgain, classify, listen, policy_for
from django_sqlsem.clients import ClientGoneError, gone_response
from django_sqlsem.ranks import hand_on, step_aside
from django_sqlsem.taken import Taken
from django_sqlsem.targets import is_async_dispatch, is_coroutine_function, refuse, refuse_skipped_view

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

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
    listen()
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
        self.names = CallName(semaphore.name, semaphore.key, func, semaphore.parts)

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
            call, taken = Call(Kind.PLAIN), Taken()
            try:
                with taken:
                    if not taken.acquire(self._named(args, kwargs), call):
                        return self._answer(call, taken)
                    return (yield from self.func(*args, **kwargs))
            except BaseException:
                taken.abandon()
                raise

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        """Wrap an asynchronous generator function: the permit is taken at the first item, and held until the last."""

        @functools.wraps(self.func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            call, taken = Call(Kind.PLAIN), Taken()
            try:
                async with taken:
                    if not await taken.aacquire(await self._anamed(args, kwargs), call):
                        await self._aanswer(call, taken)
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
        semaphore, taken = self._named(args, kwargs), Taken(late)
        try:
            with call.activity(), taken:
                if not taken.acquire(semaphore, call):
                    return self._answer(call, taken)
                with atomic_requests.atomic(aliases, call.request):
                    result = self.func(*args, **kwargs)
                if inspect.iscoroutine(result):
                    return taken.leave_to_coroutine(result)
                if call.kind is Kind.VIEW:
                    taken.leave_to_stream(result, call.request)
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
        semaphore, taken = await self._anamed(args, kwargs), Taken()
        try:
            with call.activity():
                async with taken:
                    if not await taken.aacquire(semaphore, call):
                        return await self._aanswer(call, taken)
                    result = self.func(*args, **kwargs)
                    if inspect.isawaitable(result):
                        result = await result
                    if call.kind is Kind.VIEW:
                        taken.leave_to_stream(result, call.request)
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
        return aliases, atomic_requests.opened_around(wrapper, self.func, call.request)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        name = self.names.name(args, kwargs)
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    async def _anamed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        name = await self.names.aname(args, kwargs)
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    def _answer(self, call: Call, taken: Taken) -> Any:
        if call.request is not None and isinstance(taken.refusal, ClientGoneError):
            if self.semaphore.on_busy == "raise":
                raise taken.refusal
            return gone_response(call.request)
        return self._logged(call, taken, self._decide(call, taken))

    async def _aanswer(self, call: Call, taken: Taken) -> Any:
        queries = call.request is not None or (call.task is not None and call.task.makes_queries)
        if queries and not callable(self.semaphore.on_busy):
            # In a thread, because a project's own page and context processors may make queries, and so may a backend.
            answer = await sync_to_async(self._decide)(call, taken)
        else:
            answer = self._decide(call, taken)
            if inspect.isawaitable(answer):
                answer = await answer
        return self._logged(call, taken, answer)

    def _decide(self, call: Call, taken: Taken) -> Any:
        assert taken.refusal is not None  # noqa: S101
        policy = policy_for(self.semaphore, call)
        if policy == "retry":
            taken.refusal.retry_after = step_aside(self.semaphore, call, taken.refusal)
        about = Busy.from_error(taken.refusal, call.request)
        if callable(policy):
            return policy(about)
        if policy == "raise":
            raise taken.refusal
        if call.task is not None and policy == "retry":
            sent = call.task.retry(about.retry_after, taken.refusal)
            hand_on(self.semaphore, call, taken.refusal, sent.task_id)
            log_busy(about, call.label, "is sent again for later")
            try:
                if sent.exception is not None:
                    raise sent.exception
                return sent
            finally:
                del sent  # the exception's traceback keeps this frame
        return None if call.request is None else answer_view(about, call, policy)

    def _logged(self, call: Call, taken: Taken, answer: Any) -> Any:
        if isinstance(answer, SentAgain):
            return answer.value
        assert taken.refusal is not None  # noqa: S101
        about = Busy.from_error(taken.refusal, call.request)
        if call.request is not None and callable(self.semaphore.on_busy):
            refuse_answer(answer, self.semaphore.on_busy, call, self.func)
        if call.request is not None and isinstance(answer, HttpResponseBase):
            log_busy_response(about, call.request, answer)
        else:
            work = call.label or getattr(self.func, "__qualname__", repr(self.func))
            log_busy(about, work, "was left to on_busy" if callable(self.semaphore.on_busy) else "was skipped")
        return answer
