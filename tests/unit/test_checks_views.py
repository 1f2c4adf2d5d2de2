"""The checks of the order of decorators: what they find, what they leave alone, and that nothing disturbs them."""

from __future__ import annotations

import functools
import sys
import time
import types
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.decorators import login_required, permission_required, user_passes_test
from django.contrib.auth.mixins import LoginRequiredMixin
from django.db import transaction
from django.http import HttpResponse
from django.test import override_settings
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import cache_page, never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect, ensure_csrf_cookie
from django.views.decorators.http import require_POST
from django.views.decorators.vary import vary_on_headers
from ninja import NinjaAPI
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_sqlsem import semaphore
from django_sqlsem.checks.views import check_views, messages

reports = semaphore("reports:{request.path}")
of_user = semaphore("reports:{request.user.pk}")


def view(request: Any) -> HttpResponse:
    return HttpResponse()


async def view_async(request: Any) -> HttpResponse:
    return HttpResponse()


def ids(found: Any) -> list[str]:
    return [each.id for each in messages(found)]


def class_of(*decorators: Any, name: str = "dispatch", bases: tuple[type, ...] = (View,)) -> Any:
    made: Any = type("Made", bases, {"get": lambda self, request: HttpResponse()})
    for decorator in reversed(decorators):
        made = method_decorator(decorator, name=name)(made)
    return made.as_view()


FAULTS = {
    "login below": (reports(login_required(view)), ["W014"]),
    "login below, asynchronous": (reports(login_required(view_async)), ["W014"]),
    "permission below": (reports(permission_required("x.y")(view)), ["W014"]),
    "test below": (reports(user_passes_test(lambda user: True)(view)), ["W014"]),
    "method below": (reports(require_POST(view)), ["W014"]),
    "csrf below": (reports(csrf_protect(view)), ["W014"]),
    "far below": (never_cache(reports(vary_on_headers("X")(csrf_exempt(login_required(view))))), ["W014"]),
    "between two": (semaphore("a")(login_required(reports(view))), ["W014"]),
    "cache below": (reports(cache_page(60)(view)), ["W015"]),
    "both": (reports(cache_page(60)(login_required(view))), ["W014", "W015"]),
    "class, login below": (class_of(reports, login_required), ["W014"]),
    "class, a list": (class_of([reports, login_required]), ["W014"]),
    "class, permission": (class_of(reports, permission_required("x.y")), ["W014"]),
    "class, method": (class_of([reports, require_POST]), ["W014"]),
    "class, csrf and cache": (class_of(reports, csrf_protect, cache_page(60)), ["W014", "W015"]),
    "class, mixin": (class_of(reports, bases=(LoginRequiredMixin, View)), ["W014"]),
    "around a class": (reports(class_of(login_required)), ["W014"]),
    "around a mixin": (reports(class_of(never_cache, bases=(LoginRequiredMixin, View))), ["W014"]),
    "a partial": (functools.partial(reports(login_required(view))), ["W014"]),
}
GOOD = {
    "login above": login_required(reports(view)),
    "permission above": permission_required("x.y")(reports(view)),
    "cache above": cache_page(60)(reports(view)),
    "all above": csrf_protect(require_POST(login_required(reports(view)))),
    "harmless below": reports(never_cache(vary_on_headers("X")(csrf_exempt(ensure_csrf_cookie(view))))),
    "no semaphore": cache_page(60)(login_required(view)),
    "class, login above": class_of(login_required, reports),
    "class, a list": class_of([login_required, reports]),
    "class, handler below a mixin": class_of(reports, name="get", bases=(LoginRequiredMixin, View)),
    "around a class": login_required(class_of(reports)),
    "a mixin above what is decorated": type(
        "Above", (LoginRequiredMixin, method_decorator(reports, name="dispatch")(type("Base", (View,), {}))), {}
    ).as_view(),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_stands_on_the_wrong_side(case: str) -> None:
    found, expected = FAULTS[case]
    assert ids(found) == [f"sqlsem.{each}" for each in expected]
    for each in messages(found):
        assert "reports" in each.msg or "'a'" in each.msg
        assert "/checks.html#sqlsem-w01" in str(each.hint)


@pytest.mark.parametrize("case", GOOD)
def test_what_stands_well(case: str) -> None:
    assert ids(GOOD[case]) == []


# Names that ask for the user.


def unknown(func: Any) -> Any:
    @functools.wraps(func)
    def wrapper(*args: Any) -> Any:
        return func(*args)

    return wrapper


ANONYMOUS = {
    "nothing above": of_user(view),
    "harmless above": never_cache(require_POST(of_user(view))),
    "asynchronous": of_user(view_async),
    "class": class_of(of_user),
    "parts": semaphore(("reports", "{request.user.pk}"))(view),
    "the second": semaphore("a")(of_user(view)),
    "a transaction above": transaction.atomic(of_user(view)),
}
KNOWN_USERS = {
    "login above": login_required(of_user(view)),
    "permission above": never_cache(permission_required("x.y")(of_user(view))),
    "something unknown above": unknown(of_user(view)),
    "class, login above": class_of([login_required, of_user]),
    "class, handler below a mixin": class_of(of_user, name="get", bases=(LoginRequiredMixin, View)),
    "a mixin above what is decorated": type(
        "Above", (LoginRequiredMixin, method_decorator(of_user, name="dispatch")(type("Base", (View,), {}))), {}
    ).as_view(),
    "no user": reports(view),
    "Django REST framework": api_view(["GET"])(of_user(lambda request: None)),
}


@pytest.mark.parametrize("case", ANONYMOUS)
def test_a_name_that_asks_for_the_user_without_a_login(case: str) -> None:
    assert ids(ANONYMOUS[case]) == ["sqlsem.W024"]


@pytest.mark.parametrize("case", KNOWN_USERS)
def test_a_name_that_asks_for_the_user_below_a_login(case: str) -> None:
    assert ids(KNOWN_USERS[case]) == []


def test_a_login_that_all_views_need(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    assert ids(of_user(view)) == []
    public = of_user(view)
    public.login_required = False  # what login_not_required() does
    assert ids(public) == ["sqlsem.W024"]


# API frameworks.


class Rest(APIView):
    authentication_classes = [TokenAuthentication]

    def get(self, request: Any) -> Any: ...


class RestOfSessions(Rest):
    authentication_classes = [SessionAuthentication]


class RestHandler(Rest):
    @of_user
    def get(self, request: Any) -> Any: ...


class Actions(ViewSet):
    authentication_classes = [TokenAuthentication]

    def list(self, request: Any) -> Any: ...


def test_a_name_that_asks_for_the_user_before_rest_framework_knows_it() -> None:
    above = authentication_classes([TokenAuthentication])
    for found in (
        method_decorator(of_user, name="dispatch")(type("A", (Rest,), {})).as_view(),
        of_user(Rest.as_view()),
        of_user(Actions.as_view({"get": "list"})),
        of_user(api_view(["GET"])(above(lambda request: None))),
    ):
        assert ids(found) == ["sqlsem.W016"]
    for found in (
        RestHandler.as_view(),
        of_user(RestOfSessions.as_view()),
        semaphore("one")(Rest.as_view()),
        api_view(["GET"])(above(of_user(lambda request: None))),
    ):
        assert ids(found) == []


def test_a_semaphore_above_the_route_of_ninja() -> None:
    api = NinjaAPI(urls_namespace="checks")
    module = types.ModuleType("some_api")
    sys.modules["some_api"] = module
    exec(
        "def lost(request): ...\ndef good(request): ...\ndef plain(request): ...",
        module.__dict__,
    )
    module.__dict__["lost"] = reports(api.get("/lost")(module.__dict__["lost"]))
    module.__dict__["good"] = api.get("/good")(reports(module.__dict__["good"]))
    module.__dict__["plain"] = api.get("/plain")(module.__dict__["plain"])
    try:
        found = with_urls([path("api/", api.urls)])
    finally:
        del sys.modules["some_api"]
    assert [each.id for each in found] == ["sqlsem.W016"]
    assert "some_api.lost" in found[0].msg


# Urlconfs.


def module(patterns: Any) -> types.ModuleType:
    made = types.ModuleType("urls")
    made.urlpatterns = patterns  # type: ignore[attr-defined]
    return made


def with_urls(patterns: Any) -> list[Any]:
    with override_settings(ROOT_URLCONF=module(patterns)):
        return list(check_views(None))


class Strange:
    """Whose attributes fail."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, request: Any) -> Any: ...


def test_urlconfs_of_all_kinds() -> None:
    router = DefaultRouter()
    router.register("actions", Actions, basename="actions")
    endless = reports(lambda request: None)
    endless.__wrapped__ = endless
    patterns = [
        path("admin/", admin.site.urls),
        path("router/", include(router.urls)),
        path("strange/", Strange()),
        path("partial/", functools.partial(view, None)),
        path("endless/", endless),
        path("built-in/", print),
        path("deep/", include([path("er/", include([path("view/", reports(login_required(view)))]))])),
        path("again/", include("django.contrib.auth.urls")),
    ]
    assert [each.id for each in with_urls(patterns)] == ["sqlsem.W014"]


def test_one_view_at_many_addresses_is_told_of_once() -> None:
    bad = reports(login_required(view))
    assert len(with_urls([path(f"{number}/", bad) for number in range(5)])) == 1


@pytest.mark.parametrize(
    "urls", [None, "", "no.such.module", types.SimpleNamespace(), types.SimpleNamespace(urlpatterns=3)]
)
def test_a_project_without_good_urls_hears_nothing_from_us(urls: Any) -> None:
    with override_settings(ROOT_URLCONF=urls):
        assert list(check_views(None)) == []


def test_two_thousand_views_take_a_moment() -> None:
    patterns = [
        path(f"{number}/", login_required(semaphore(f"n{number}")(lambda request: None))) for number in range(2000)
    ]
    start = time.process_time()
    assert with_urls(patterns) == []
    assert time.process_time() - start < 2  # measured: 0.1 s
