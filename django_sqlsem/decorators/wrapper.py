"""Decorated functions: one permit per call, whatever kind of function and of call it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from asgiref.sync import sync_to_async
from django.http.response import HttpResponseBase

from django_sqlsem.busy import Busy
from django_sqlsem.core import identity
from django_sqlsem.core.templates import ANYTHING, CallName, is_coroutine_function, is_or_calls, signature_of
from django_sqlsem.database.transactions import at_transaction_end
from django_sqlsem.decorators import tasks, views
from django_sqlsem.decorators.answers import (
    answer_view,
    log_busy,
    log_busy_response,
    refuse_answer,
    refuse_coroutine,
)
from django_sqlsem.decorators.calls import PLAIN, Call, classify, is_async_dispatch, refuse, refuse_skipped_view
from django_sqlsem.decorators.clients import ClientGoneError, client_of, gone_response
from django_sqlsem.exceptions import AcquireTimeoutError, AlreadyHeldError
from django_sqlsem.locks.permit import Permit
from django_sqlsem.locks.semaphore import Semaphore


class CallPermit:
    """The permit of one call, until the call ends or leaves it to a response or a coroutine.

    Used as a block: an exception that leaves the block leaves to the keeper what was not given back by ``finish()``.
    """

    def __init__(self, call: Call, *, late: bool = False) -> None:
        """``late``: the permit outlasts the transaction that is open around the call."""
        self.call = call
        self.late = late
        self.permit: Permit | None = None
        self.left: Permit | None = None
        #: Why there is no permit. It is kept here alone: if it is raised, its traceback keeps the frames it passes.
        self.refusal: AcquireTimeoutError | None = None

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, *exc_info: object) -> None:
        """End it."""
        if kind is not None:
            self.abandon()

    def abandon(self) -> None:
        """Leave the permit to the keeper: an exception interrupted the giving back, or the handing over."""
        permit = self.permit or self.left
        if permit is not None:
            permit._abandon()

    def acquire(self, lock: Semaphore) -> bool:
        """Take a permit, or note why there is none. Return whether there is one."""
        call, timeout = self.call, self.call.timeout(lock)
        client = client_of(call) if call.request is not None and timeout != 0 else None
        try:
            rank = call.rank(lock) if call.task is not None else ""
            self.permit = lock._take(timeout, rank, client, None if call is PLAIN else call.bound(lock, timeout))
            if client is not None:
                client.check(lock.name)  # granted at the very moment of leaving: it goes back
        except AcquireTimeoutError as error:
            self.refusal = error
        return self.refusal is None

    async def aacquire(self, lock: Semaphore) -> bool:
        """Take a permit, or note why there is none. Return whether there is one."""
        try:
            call, timeout = self.call, self.call.timeout(lock)
            bound = None if call is PLAIN else call.bound(lock, timeout, waits_in_thread=False)
            self.permit = await lock._atake(timeout, call.rank(lock), bound)
        except AcquireTimeoutError as error:
            self.refusal = error
        return self.refusal is None

    def finish(self) -> None:
        """The call has ended: give back what it has not left to anything else."""
        self.refusal = None
        if self.permit is not None:
            if self.late:
                at_transaction_end(None, self.permit._close)
            else:
                self.permit._finish()
            self.permit = None

    async def afinish(self) -> None:
        """The call of a coroutine has ended."""
        self.refusal = None
        if self.permit is not None:
            await self.permit._afinish()
            self.permit = None

    def leave_to_response(self, response: Any) -> None:
        """If a view's response is made after the call, as streams and templates are, leave the permit to it."""
        request = self.call.request
        if self.permit is not None and request is not None and views.is_made_later(response):
            views.leave_to(response, self.permit, request)
            self._leave(self.permit)

    def leave_to_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """Let the coroutine that a plain function has returned give the permit back at its end."""

        async def finish(later: CallPermit) -> Any:
            with later:
                try:
                    return await coroutine
                finally:
                    await later.afinish()

        return finish(self._later())

    def leave_to_generator(self, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Let the generator that a plain function has returned give the permit back at its end."""

        def finish(later: CallPermit) -> Generator[Any, Any, Any]:
            with later:
                try:
                    return (yield from generator)
                finally:
                    later.finish()

        return finish(self._later())

    def _later(self) -> CallPermit:
        later = CallPermit(self.call, late=self.late)
        later.permit = self.permit
        if self.permit is not None:
            self._leave(self.permit)
        return later

    def _leave(self, permit: Permit) -> None:
        permit.detach()
        self.left, self.permit = permit, None


F = TypeVar("F", bound="Callable[..., Any]")
#: What decorated functions there are, each with its semaphore: for the system checks.
declared: weakref.WeakKeyDictionary[Callable[..., Any], Semaphore] = weakref.WeakKeyDictionary()
_NOTHING = contextlib.nullcontext()


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
    for listen in tasks.listeners:
        listen()
    decorated = _Decorated(semaphore, func)
    if is_or_calls(inspect.isasyncgenfunction, func):
        wrapper = decorated.async_generator()
    elif is_or_calls(inspect.isgeneratorfunction, func):
        wrapper = decorated.generator()
    elif is_coroutine_function(func):
        wrapper = decorated.coroutine()
    else:
        wrapper = decorated.function()
        views.opt_out(wrapper, func)
    _describe(wrapper, func)
    declared[wrapper] = semaphore
    return cast("F", wrapper)


def _describe(wrapper: Callable[..., Any], func: Callable[..., Any]) -> None:
    """Give ``wrapper`` the signature of ``func`` for those who don't follow ``__wrapped__``, such as Celery."""
    if not isinstance(func, functools.partial) and (signature := signature_of(func)) != ANYTHING:
        wrapper.__signature__ = _resolved(signature, func)  # type: ignore[attr-defined]


def _resolved(signature: inspect.Signature, func: Callable[..., Any]) -> inspect.Signature:
    """Evaluate annotations that are text: a reader would look their names up in this library's modules.

    What names something that is not there, or for type checkers only, stays text.
    """
    names = getattr(inspect.unwrap(func), "__globals__", {})

    def value(annotation: object) -> object:
        if isinstance(annotation, str):
            with contextlib.suppress(Exception):
                # Compiled first: once a KeyboardInterrupt was raised in an eval() of text, CPython ends the process by
                # SIGINT in the end, though it was caught.
                code = compile(annotation.lstrip(" \t"), "<annotation>", "eval", dont_inherit=True)
                return eval(code, names)  # noqa: S307 - the project's own code, as inspect does
        return annotation

    parameters = [each.replace(annotation=value(each.annotation)) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=value(signature.return_annotation))


class _Decorated:
    """A semaphore and the function that it decorates. Calls leave no trace here."""

    def __init__(self, semaphore: Semaphore, func: Callable[..., Any]) -> None:
        self.semaphore = semaphore
        self.func = func
        self.names = CallName(semaphore.name, semaphore.key, func, semaphore.parts)
        #: The semaphore of every call, if the name depends on none.
        self.fixed = self._named(self.names.name((), {})) if self.names.is_fixed else None

    def function(self) -> Callable[..., Any]:
        """Wrap a function, or a view."""

        @functools.wraps(self.func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = classify(wrapper, args)
            if call.request is not None and is_async_dispatch(self.func, args):
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
            taken = CallPermit(PLAIN)
            with taken:
                try:
                    if not taken.acquire(self._lock(args, kwargs)):
                        return self._answer(taken)
                    return (yield from self.func(*args, **kwargs))
                finally:
                    taken.finish()

        return wrapper

    def async_generator(self) -> Callable[..., Any]:
        """Wrap an asynchronous generator function: the permit is taken at the first item, and held until the last."""

        @functools.wraps(self.func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            taken = CallPermit(PLAIN)
            with taken:
                try:
                    if not await taken.aacquire(await self._alock(args, kwargs)):
                        await self._aanswer(taken)
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
                finally:
                    await taken.afinish()

        return wrapper

    # A call, synchronous and asynchronous.

    def _call(self, wrapper: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lock, taken = self.fixed or self._lock(args, kwargs), CallPermit(call)
        aliases, taken.late = self._transactions(wrapper, call) if call.request is not None else ([], False)
        try:  # not by the block: a response that the exception keeps may have the permit
            with _NOTHING if call is PLAIN else call.activity():
                try:
                    if not self._goes(taken, lock, wrapper, args):
                        return self._answer(taken)
                    with views.atomic(aliases, call.request) if aliases else _NOTHING:
                        result = self.func(*args, **kwargs)
                    if inspect.iscoroutine(result):
                        return taken.leave_to_coroutine(result)
                    if inspect.isgenerator(result):
                        return taken.leave_to_generator(result)
                    if call.request is not None:
                        taken.leave_to_response(result)
                    return result
                finally:
                    taken.finish()
        except BaseException:
            taken.abandon()
            raise

    async def _acall(
        self, wrapper: Callable[..., Any], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        aliases, _ = self._transactions(wrapper, call)
        if aliases:
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")  # in Django's own words
        lock, taken = await self._alock(args, kwargs), CallPermit(call)
        with taken, call.activity():
            try:
                if not await self._agoes(taken, lock, wrapper, args):
                    return await self._aanswer(taken)
                result = self.func(*args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
                taken.leave_to_response(result)
                return result
            finally:
                await taken.afinish()

    @staticmethod
    def _goes(taken: CallPermit, lock: Semaphore, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether the call may go on: with a permit, or under its caller's."""
        try:
            return taken.acquire(lock)
        except AlreadyHeldError:
            if not tasks.runs_at_once(wrapper, args):
                raise
            return True

    @staticmethod
    async def _agoes(taken: CallPermit, lock: Semaphore, wrapper: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        try:
            return await taken.aacquire(lock)
        except AlreadyHeldError:
            if not tasks.runs_at_once(wrapper, args):
                raise
            return True

    def _transactions(self, wrapper: Callable[..., Any], call: Call) -> tuple[list[str], bool]:
        """Which transactions the call must open, and whether one is open that the permit must outlast."""
        if call.request is None:
            return [], False
        refuse_skipped_view(self.semaphore, self.func)
        aliases = views.aliases_to_open(wrapper, self.func, call.request)
        return aliases, views.opened_around(wrapper, self.func, call.request)

    def _lock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        """Return the semaphore under the name that these arguments give it."""
        return self.fixed or self._named(self.names.name(args, kwargs))

    async def _alock(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Semaphore:
        return self.fixed or self._named(await self.names.aname(args, kwargs))

    def _named(self, name: str) -> Semaphore:
        return self.semaphore if name == self.semaphore.name else self.semaphore._named(name)

    # A call that got no slot.

    def _answer(self, taken: CallPermit) -> Any:
        request = taken.call.request
        if request is not None and isinstance(taken.refusal, ClientGoneError):
            if self.semaphore.on_busy == "raise":
                raise taken.refusal
            return gone_response(request)
        return self._logged(taken, self._decide(taken))

    async def _aanswer(self, taken: CallPermit) -> Any:
        call = taken.call
        queries = call.request is not None or (call.task is not None and call.task.makes_queries)
        if queries and not callable(self.semaphore.on_busy):
            # In a thread, because a project's own page and context processors may make queries, and so may a backend.
            answer = await sync_to_async(self._decide)(taken)
        else:
            answer = self._decide(taken)
            if inspect.isawaitable(answer):
                answer = await answer
        return self._logged(taken, answer)

    def _decide(self, taken: CallPermit) -> Any:
        assert taken.refusal is not None  # noqa: S101
        call, policy = taken.call, taken.call.policy(self.semaphore)
        if call.task is not None and policy == "retry":
            return self._send_again(taken.refusal, call.task)
        about = Busy.from_error(taken.refusal, call.request)
        if callable(policy):
            return policy(about)
        if policy == "raise":
            raise taken.refusal
        return None if call.request is None else answer_view(about, call, policy)

    def _send_again(self, refusal: AcquireTimeoutError, task: tasks.RunningTask) -> Any:
        lock, sent = self._named(refusal.name), None
        try:
            refusal.retry_after = tasks.step_aside(lock, task, refusal)
            about = Busy.from_error(refusal)
            sent = task.retry(about.retry_after, refusal)
            tasks.hand_on(lock, task, sent.task_id)
            log_busy(about, task.label, "is sent again for later", level=logging.INFO)
            if sent.exception is not None:
                raise sent.exception
            return sent
        finally:
            del refusal, sent  # the exception's traceback keeps this frame

    def _work(self) -> str:
        """Return what the function is called in the log: a command as its holder is."""
        name = str(getattr(self.func, "__qualname__", repr(self.func)))
        if name == "Command.handle" and ".management.commands." in getattr(self.func, "__module__", ""):
            return identity.current().label or name
        return name

    def _logged(self, taken: CallPermit, answer: Any) -> Any:
        if isinstance(answer, tasks.SentAgain):
            return answer.value
        assert taken.refusal is not None  # noqa: S101
        request, on_busy = taken.call.request, self.semaphore.on_busy
        about = Busy.from_error(taken.refusal, request)
        if request is not None and callable(on_busy):
            refuse_answer(answer, on_busy, taken.call, self.func)
        if request is not None and isinstance(answer, HttpResponseBase):
            log_busy_response(about, request, answer)
        else:
            work = taken.call.label or self._work()
            if callable(on_busy):
                refuse_coroutine(answer, on_busy, self.func)
                log_busy(about, work, "was left to on_busy")
            else:
                log_busy(about, work, "was skipped", level=logging.INFO)
        return answer
