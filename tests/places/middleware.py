"""Middleware of the tests: synchronous and asynchronous links of the chain, and some that mistreat a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.decorators import async_only_middleware, sync_only_middleware


@sync_only_middleware
def in_a_thread(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """A synchronous link."""

    def middleware(request: HttpRequest) -> Any:
        return get_response(request)

    return middleware


@async_only_middleware
def on_the_loop(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """An asynchronous link."""

    async def middleware(request: HttpRequest) -> Any:
        return await get_response(request)

    return middleware


@sync_only_middleware
def mistreating(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Do with the response what ``?treat=`` says: ``replace`` it without closing it, or ``fail``."""

    def middleware(request: HttpRequest) -> Any:
        response = get_response(request)
        if request.GET.get("treat") == "replace":
            return HttpResponse("another")
        if request.GET.get("treat") == "fail":
            raise RuntimeError("a middleware failed")
        return response

    return middleware
