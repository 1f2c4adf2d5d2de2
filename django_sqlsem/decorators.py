"""Decorated functions: one permit per call, whatever kind of function and of call it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http.response import HttpResponseBase

from django_sqlsem import atomic_requests, conf
from django_sqlsem.busy import Busy, busy_response, log_busy, log_busy_response
from django_sqlsem.call_names import CallName, describe
from django_sqlsem.calls import Call, Kind, classify, retry_task
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.targets import is_async_dispatch, is_coroutine_function, refuse
from django_sqlsem.timeouts import Unset
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
            call = Call(Kind.PLAIN)
            permit = self._acquire(self._named(args, kwargs), call)
            if isinstance(permit, AcquireTimeoutError):
                return self._answer(call, permit)
            try:
                return (yield from self.func(*args, **kwargs))
            finally:
                permit._finish()

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        """Wrap an asynchronous generator function: the permit is taken at the first item, and held until the last."""

        @functools.wraps(self.func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            call = Call(Kind.PLAIN)
            permit = await self._aacquire(await self._anamed(args, kwargs), call)
            if isinstance(permit, AcquireTimeoutError):
                await self._aanswer(call, permit)
                return
            try:
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
                        except BaseException as error:  # noqa: BLE001 - what is thrown in belongs to the generator
                            step = inner.athrow(error)
                        else:
                            step = inner.asend(sent)
            finally:
                await permit._afinish()

        return wrapper

    # A call, synchronous and asynchronous.

    def _call(self, wrapper: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        aliases, late = self._transactions(wrapper, call)
        semaphore = self._named(args, kwargs)
        with call.activity():
            permit = self._acquire(semaphore, call)
            if isinstance(permit, AcquireTimeoutError):
                return self._answer(call, permit)
            handed_over = False
            try:
                with atomic_requests.atomic(aliases):
                    result = self.func(*args, **kwargs)
                if inspect.iscoroutine(result):
                    permit.detach()
                    result = self._finish(result, permit)
                    handed_over = True
                elif call.kind is Kind.VIEW:
                    handed_over = _hand_over(permit, result)
                return result
            finally:
                if not handed_over:
                    permit._finish() if not late else at_transaction_end(None, permit._close)

    async def _acall(
        self, wrapper: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        aliases, _ = self._transactions(wrapper, call)
        if aliases:
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")  # in Django's own words
        semaphore = await self._anamed(args, kwargs)
        with call.activity():
            permit = await self._aacquire(semaphore, call)
            if isinstance(permit, AcquireTimeoutError):
                return await self._aanswer(call, permit)
            handed_over = False
            try:
                result = self.func(*args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
                if call.kind is Kind.VIEW:
                    handed_over = _hand_over(permit, result)
                return result
            finally:
                if not handed_over:
                    await permit._afinish()

    async def _finish(self, coroutine: Coroutine[Any, Any, Any], permit: Permit) -> Any:
        try:
            return await coroutine
        finally:
            await permit._afinish()

    def _transactions(self, wrapper: Callable[..., Any], call: Call) -> tuple[list[str], bool]:
        """Which transactions the call must open, and whether one is open that the permit must outlast."""
        if call.request is None:
            return [], False
        if self.semaphore.on_busy == "skip":
            raise ImproperlyConfigured(
                f'on_busy="skip" is for functions and tasks; the view {getattr(self.func, "__qualname__", self.func)} '
                "must answer something. Use a status from 400 to 599, or a callable that returns a response."
            )
        aliases = atomic_requests.aliases_to_open(wrapper, self.func, call.request)
        return aliases, atomic_requests.opened_by_handler(self.func, call.request)

    # Taking, and giving back.

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        name = self.names.name(args, kwargs)
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    async def _anamed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        name = await self.names.aname(args, kwargs)
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    def _acquire(self, semaphore: Semaphore, call: Call) -> Permit | AcquireTimeoutError:
        try:
            return semaphore.acquire(timeout=self._timeout(call))
        except AcquireTimeoutError as error:
            return error

    async def _aacquire(self, semaphore: Semaphore, call: Call) -> Permit | AcquireTimeoutError:
        try:
            return await semaphore.aacquire(timeout=self._timeout(call))
        except AcquireTimeoutError as error:
            return error

    def _timeout(self, call: Call) -> Unset | float | None:
        given = self.semaphore.timeout
        if call.kind is Kind.VIEW:
            return conf.config().view_timeout if isinstance(given, Unset) else given
        if call.kind is Kind.TASK:
            return conf.config().task_timeout if isinstance(given, Unset) else given
        if self.semaphore.on_busy == "retry" and isinstance(given, (int, float)):
            # Nobody would call again, as a worker would: waiting stands in for it.
            default = conf.config(self.semaphore.using).timeout
            return None if default is None else max(given, default)
        return given

    # No slot was free.

    def _policy(self, call: Call) -> Any:
        chosen = self.semaphore.on_busy
        if call.kind is Kind.VIEW:  # a visitor retries when told to
            return conf.config().busy_status if chosen in (None, "retry") else chosen
        default = "retry" if call.kind is Kind.TASK else "raise"
        return default if chosen is None or chosen == "retry" or isinstance(chosen, int) else chosen

    def _answer(self, call: Call, error: AcquireTimeoutError) -> Any:
        policy, about = self._policy(call), Busy.from_error(error)
        if callable(policy):
            answer = policy(about)
        elif call.request is not None and isinstance(policy, int):
            answer = busy_response(about, call.request, policy)
        else:
            answer = self._refuse(call, policy, about, error)
        return self._logged(call, about, policy, answer)

    async def _aanswer(self, call: Call, error: AcquireTimeoutError) -> Any:
        policy, about = self._policy(call), Busy.from_error(error)
        if callable(policy):
            answer = policy(about)
            if inspect.isawaitable(answer):
                answer = await answer
        elif call.request is not None and isinstance(policy, int):
            # In a thread, because a project's own page and context processors may make queries.
            answer = await sync_to_async(busy_response)(about, call.request, policy)
        else:
            answer = self._refuse(call, policy, about, error)
        return self._logged(call, about, policy, answer)

    def _refuse(self, call: Call, policy: str, about: Busy, error: AcquireTimeoutError) -> Any:
        if policy == "raise":
            raise error
        if policy == "retry":
            retry = retry_task(call.task, about.retry_after, error)
            log_busy(about, call.label, "is sent again for later")
            raise retry
        return None

    def _logged(self, call: Call, about: Busy, policy: object, answer: Any) -> Any:
        if call.request is not None and isinstance(answer, HttpResponseBase):
            log_busy_response(about, call.request, answer)
        else:
            work = call.label or getattr(self.func, "__qualname__", repr(self.func))
            log_busy(about, work, "was skipped" if policy == "skip" else "was left to on_busy")
        return answer


def _hand_over(permit: Permit, response: Any) -> bool:
    """Leave the permit to a streaming response, which gives it back when it is closed. Return whether that is so."""
    if not (isinstance(response, HttpResponseBase) and response.streaming):
        return False
    permit.detach()
    response._resource_closers.append(permit._close)  # type: ignore[attr-defined]
    return True
