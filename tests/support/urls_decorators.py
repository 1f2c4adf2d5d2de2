"""Views for the tests of decorators. ``SEEN`` is what they saw from inside, newest last."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.db import connections, transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import TemplateView

from django_sqlsem import semaphore
from django_sqlsem.core import identity

SEEN: list[Any] = []


def look(**extra: Any) -> HttpResponse:
    who = identity.current()
    blocks = {
        alias: len(connections[alias].atomic_blocks) if connections[alias].in_atomic_block else 0
        for alias in connections
    }
    SEEN.append({"label": who.label, "user": who.user, "blocks": blocks, **extra})
    return HttpResponse("seen")


@semaphore("plain")
def plain(request):
    return look()


@semaphore("async")
async def plain_async(request):
    await asyncio.sleep(0)
    return look()


@login_required
@semaphore("user:{request.user.pk}")
def per_user(request):
    return look()


@semaphore("user:{request.user.pk}")
async def per_user_async(request):
    return look()


@csrf_exempt
@semaphore("post")
@csrf_exempt
def posted(request):
    return look()


@semaphore("writes")
def writes(request):
    User.objects.create(username="ann")
    if "fail" in request.GET:
        raise ZeroDivisionError
    return look()


@semaphore("outer")
@semaphore("inner")
def stacked(request):
    return look()


@transaction.non_atomic_requests
@semaphore("above")
def opted_out_above(request):
    return look()


@semaphore("below")
@transaction.non_atomic_requests
def opted_out_below(request):
    return look()


@method_decorator(semaphore("dispatch"), name="dispatch")
class Dispatched(View):
    def get(self, request, word=""):
        return look(word=word)


@method_decorator([semaphore("outer"), semaphore("inner")], name="dispatch")
class DispatchedTwice(View):
    def get(self, request):
        return look()


@method_decorator(transaction.non_atomic_requests, name="dispatch")
@method_decorator(semaphore("dispatch"), name="dispatch")
class OptedOutAbove(View):
    def get(self, request):
        return look()


@method_decorator(semaphore("dispatch"), name="dispatch")
@method_decorator(transaction.non_atomic_requests, name="dispatch")
class OptedOutBelow(View):
    def get(self, request):
        return look()


class Direct(View):
    @semaphore("direct:{word}")
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)

    def get(self, request, word):
        return look(word=word)


class GetOnly(View):
    @semaphore("get")
    def get(self, request):
        return look()


@method_decorator(semaphore("dispatch"), name="dispatch")
class AsyncDispatched(View):
    async def get(self, request):
        await asyncio.sleep(0)
        return look()


@method_decorator([semaphore("outer"), semaphore("inner")], name="dispatch")
class AsyncDispatchedTwice(View):
    async def get(self, request):
        await asyncio.sleep(0)
        return look()


class AsyncDirect(View):
    @semaphore("direct")
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)

    async def get(self, request):
        return look()


class AsyncGet(View):
    @semaphore("get")
    async def get(self, request):
        return look()


@method_decorator(semaphore("page"), name="dispatch")
class Page(TemplateView):
    template_name = "sqlsem/busy.html"
    extra_context = {"retry_after": 1}


def parts(count=3):
    for number in range(count):
        yield f"{number}\n"


async def aparts():
    for part in parts():
        await asyncio.sleep(0)
        yield part


@semaphore("stream")
def streams(request):
    return StreamingHttpResponse(parts())


@semaphore("stream")
async def streams_async(request):
    return StreamingHttpResponse(aparts())


@semaphore("file")
def file(request):
    return FileResponse(open(__file__, "rb"))


@semaphore("twice")
def helper(request):
    look()


def uses_helper(request):
    helper(request)
    helper(request)
    return HttpResponse(json.dumps("done"))


urlpatterns = [
    path("plain", plain),
    path("plain_async", plain_async),
    path("per_user", per_user),
    path("per_user_async", per_user_async),
    path("posted", posted),
    path("writes", writes),
    path("stacked", stacked),
    path("opted_out_above", opted_out_above),
    path("opted_out_below", opted_out_below),
    path("class/dispatched", Dispatched.as_view()),
    path("class/dispatched/<word>", Dispatched.as_view()),
    path("class/dispatched_twice", DispatchedTwice.as_view()),
    path("class/opted_out_above", OptedOutAbove.as_view()),
    path("class/opted_out_below", OptedOutBelow.as_view()),
    path("class/direct/<word>", Direct.as_view()),
    path("class/get_only", GetOnly.as_view()),
    path("class/async_dispatched", AsyncDispatched.as_view()),
    path("class/async_dispatched_twice", AsyncDispatchedTwice.as_view()),
    path("class/async_direct", AsyncDirect.as_view()),
    path("class/async_get", AsyncGet.as_view()),
    path("class/page", Page.as_view()),
    path("streams", streams),
    path("streams_async", streams_async),
    path("file", file),
    path("uses_helper", uses_helper),
]
