"""Views that write a row, decorated in every way, for the tests of ``ATOMIC_REQUESTS``. All take ``place``."""

from __future__ import annotations

import functools
import threading

from django.contrib.auth.models import User
from django.db import connections, transaction
from django.http import HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from ninja import NinjaAPI
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_sqlsem import semaphore


class Stage:
    """What a test and the views share: the alias to write to, and when to go on."""

    alias = "default"
    inside = threading.Event()
    go = threading.Event()
    depths: list[int] = []


def work(request):
    """Write a row, and stay until the test has someone in line."""
    connection = connections[Stage.alias]
    Stage.depths.append(len(connection.atomic_blocks) if connection.in_atomic_block else 0)
    User.objects.using(Stage.alias).create(username="ann")
    Stage.inside.set()
    assert Stage.go.wait(60)
    if "fail" in request.GET:
        raise ZeroDivisionError
    return HttpResponse("done")


place = semaphore("place", timeout=30)


def copies_nothing(view):
    def wrapper(*args, **kwargs):
        return view(*args, **kwargs)

    return wrapper


def copies(view):
    @functools.wraps(view)
    def wrapper(*args, **kwargs):
        return view(*args, **kwargs)

    return wrapper


def copies_no_dict(view):
    return functools.wraps(view, updated=())(copies_nothing(view))


class AnObject:
    def __init__(self, view):
        self.view = view

    def __call__(self, request):
        return self.view(request)


class AnObjectThatCopies(AnObject):
    def __init__(self, view):
        super().__init__(view)
        functools.update_wrapper(self, view)


class AnObjectOfSlots:
    __slots__ = ("views",)

    def __init__(self, **views):
        self.views = views

    def __call__(self, request):
        return self.views[request.method](request)


class Router:
    """Which is no view, but has one."""

    def __init__(self, *views):
        self.views = views


def per_method(**views):
    return lambda request: views[request.method](request)


def default(view):
    def wrapper(request, view=view):
        return view(request)

    return wrapper


def keyword_default(given):
    def wrapper(request, *, view=given):
        return view(request)

    del given
    return wrapper


def routed(router):
    return lambda request: router.views[0](request)


def keyword(view, unused, request):
    return view(request)


def keyword_only(request, *, view):
    return view(request)


@place
def plain(request):
    return work(request)


@place
@copies
def below(request):
    return work(request)


@semaphore("outer")
@copies_nothing
@place
def below_another(request):
    return work(request)


@place
@transaction.atomic
def atomic_below(request):
    return work(request)


@transaction.atomic
@semaphore("place", timeout=30, release="on_commit")
def atomic_above(request):
    return work(request)


@method_decorator(place, name="dispatch")
class Dispatched(View):
    def get(self, request):
        return work(request)


class Inherits(Dispatched):
    pass


class Overrides(Dispatched):
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)


@method_decorator(place, name="get")
class Handler(View):
    def get(self, request):
        return work(request)


class Plain(View):
    def get(self, request):
        return work(request)


@method_decorator(place, name="dispatch")
class RestDispatch(APIView):
    def get(self, request):
        return Response(work(request).content.decode())


@api_view(["GET"])
@place
def rest_function(request):
    return Response(work(request).content.decode())


class RestClass(APIView):
    @place
    def get(self, request):
        return Response(work(request).content.decode())


class RestSet(ViewSet):
    @place
    def list(self, request):
        return Response(work(request).content.decode())

    @action(detail=False)
    @place
    def extra(self, request):
        return Response(work(request).content.decode())


@place
def template(request):
    return TemplateResponse(request, engines["django"].from_string(work(request).content.decode()))


class RenderedInside(View):
    """Which renders what its handler returns, inside the transaction."""

    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs).render()

    @method_decorator(place)
    def get(self, request):
        return TemplateResponse(request, engines["django"].from_string(work(request).content.decode()))


class RestMixin:
    """Whose actions are below one more decorator."""

    @method_decorator(never_cache)
    @place
    def rows(self, request):
        return Response(work(request).content.decode())


class RestSetOfMixin(RestMixin, ViewSet):
    pass


api = NinjaAPI(urls_namespace="atomic")


@api.get("operation")
@place
def operation(request):
    return work(request)


@api.get("wrapped-operation")
@copies
@place
def wrapped_operation(request):
    return work(request)


#: Before the BEGIN: the URLconf's view shows the mark. The rest take their permit inside the handler's transaction.
AHEAD = {
    "plain": plain,
    "below": below,
    "copies": copies(plain),
    "copies-twice": copies(copies(plain)),
    "object-that-copies": AnObjectThatCopies(plain),
    "never-cache": never_cache(plain),
    "atomic-below": atomic_below,
    "dispatched": Dispatched.as_view(),
    "inherits": Inherits.as_view(),
    "below-another-view": copies(Dispatched.as_view()),
    "around-as-view": place(Plain.as_view()),
    "rest-dispatch": RestDispatch.as_view(),
    "template": template,
}
INSIDE = {
    "copies-nothing": copies_nothing(plain),
    "copies-no-dict": copies_no_dict(plain),
    "object": AnObject(plain),
    "object-of-an-object": AnObject(AnObject(plain)),
    "partial": functools.partial(keyword, plain, None),
    "partial-by-keyword": functools.partial(keyword_only, view=plain),
    "object-of-a-partial": AnObject(functools.partial(keyword, plain, None)),
    "object-of-slots": AnObjectOfSlots(GET=plain),
    "per-method": per_method(GET=plain),
    "default": default(plain),
    "keyword-default": keyword_default(plain),
    "routed": routed(Router(plain)),
    "below-another": below_another,
    "overrides": Overrides.as_view(),
    "handler": Handler.as_view(),
    "atomic-above": atomic_above,
    "rendered-inside": RenderedInside.as_view(),
    "rest-function": rest_function,
    "rest-class": RestClass.as_view(),
    "rest-list": RestSet.as_view({"get": "list"}),
    "rest-action": RestSet.as_view({"get": "extra"}),
    "rest-rows": RestSetOfMixin.as_view({"get": "rows"}),
}
urlpatterns = [path(where, view) for where, view in (AHEAD | INSIDE).items()] + [path("ninja/", api.urls)]
