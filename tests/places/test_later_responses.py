"""Responses that are made after the view has returned: templates, whose queries are made then, and streams.

The proof is the text of each page: how many slots the tables say are held as it is rendered. Streams are tried under
servers too, in ``test_streaming``.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.datastructures import MultiValueDict
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_page
from django.views.generic import TemplateView
from rest_framework.decorators import api_view, renderer_classes
from rest_framework.renderers import BaseRenderer
from rest_framework.response import Response

from django_sqlsem import semaphore
from tests.support.databases import assert_nothing_held, held_rows

place = semaphore("place", timeout=0)


class Stage:
    """The alias whose tables are read as a page is rendered."""

    alias = "default"

    @classmethod
    def held(cls) -> int:
        try:
            return len(held_rows(cls.alias))
        finally:
            connections[cls.alias].close()


def page(request: Any, text: str = "{{ held }}") -> TemplateResponse:
    return TemplateResponse(request, engines["django"].from_string(text), {"held": Stage.held, "fail": fail})


def fail() -> None:
    raise ZeroDivisionError


class Renderer(BaseRenderer):
    media_type, format = "text/plain", "txt"

    def render(self, data: object, *_: object) -> bytes:
        return str(Stage.held()).encode()


@place
def function(request: Any) -> TemplateResponse:
    return page(request)


@place
async def asynchronous(request: Any) -> TemplateResponse:
    return page(request)


@method_decorator(place, name="dispatch")
class Generic(TemplateView):
    template_engine = None

    def render_to_response(self, context: Any, **_: Any) -> TemplateResponse:
        return page(self.request)


@api_view(["GET"])
@renderer_classes([Renderer])
@place
def rest(request: Any) -> Response:
    return Response("data")


@semaphore("outer", timeout=0)
@place
def both(request: Any) -> TemplateResponse:
    return page(request)


@place
def rendered(request: Any) -> TemplateResponse:
    return page(request).render()


@place
def fails(request: Any) -> TemplateResponse:
    return page(request, "{{ fail }}")


PAGES: dict[str, tuple[Callable[..., Any], bytes]] = {
    "function": (function, b"1"),
    "asynchronous": (asynchronous, b"1"),
    "generic": (Generic.as_view(), b"1"),
    "rest": (rest, b"1"),
    "both": (both, b"2"),
    "rendered": (rendered, b"1"),
}
urlpatterns = [
    *(path(name, view) for name, (view, _) in PAGES.items()),
    path("cached", cache_page(60)(function)),
    path("fails", fails),
]


class Replaces:
    """A middleware that answers something else than the template, which is never rendered."""

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self.get_response(request)

    def process_template_response(self, request: Any, response: Any) -> Any:
        return Replaced(b"replaced")


class Replaced(HttpResponse):
    def render(self) -> HttpResponse:
        return self


@pytest.fixture
def stage(database: str, settings: Any) -> str:
    settings.ROOT_URLCONF = __name__
    settings.SQLSEM = {"DATABASE": database}
    settings.MIDDLEWARE = []
    Stage.alias = database
    return database


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_slot_is_held_until_the_page_is_rendered(stage: str, name: str) -> None:
    for _ in range(2):
        assert Client().get(f"/{name}").content == PAGES[name][1]
        assert_nothing_held(stage, within=0)


def test_under_an_asynchronous_handler(stage: str) -> None:
    async def get(name: str) -> None:
        response = await AsyncClient().get(f"/{name}")
        assert response.content == PAGES[name][1]
        assert not (await place.astatus()).held

    for name in ("function", "asynchronous", "generic"):
        asyncio.run(get(name))


@pytest.mark.parametrize("case", ["fails", "replaced"])
def test_a_page_that_is_never_made(stage: str, settings: Any, case: str) -> None:
    if case == "replaced":
        settings.MIDDLEWARE = [f"{__name__}.Replaces"]
    for _ in range(2):
        response = Client(raise_request_exception=False).get("/fails" if case == "fails" else "/function")
        assert response.status_code == (500 if case == "fails" else 200)
        assert_nothing_held(stage)


def test_a_page_that_nobody_renders_has_the_slot_until_it_is_dropped(stage: str) -> None:
    response = function(RequestFactory().get("/"))
    assert Stage.held() == 1
    del response
    assert_nothing_held(stage)


def test_a_stream_that_fails_gives_the_slot_back_before_anybody_closes_it(stage: str) -> None:
    def parts() -> Iterator[str]:
        yield str(Stage.held())
        raise ZeroDivisionError

    response = place(lambda request: StreamingHttpResponse(parts()))(RequestFactory().get("/"))
    with pytest.raises(ZeroDivisionError):
        list(response)
    assert Stage.held() == 0


def test_a_stream_in_a_middlewares_own_response_cleans_up_before_the_next_holder(stage: str) -> None:
    held = []

    def parts() -> Iterator[str]:
        try:
            yield "a"
            yield "b"
        finally:
            held.append(Stage.held())

    request = RequestFactory().get("/")
    response = place(lambda request: StreamingHttpResponse(parts()))(request)
    other = StreamingHttpResponse(response.streaming_content)
    other._resource_closers.append(request.close)  # as Django's handler does
    del response
    assert next(iter(other)) == b"a"
    other.close()
    assert held == [1]
    assert Stage.held() == 0


def test_the_end_of_the_request_gives_back_the_slots_of_all_its_streams(stage: str) -> None:
    class Uploads(io.BytesIO):
        """A file of the request's."""

    request = RequestFactory().get("/")
    request._files = MultiValueDict({"file": [file := Uploads()]})
    streams = [semaphore(name)(lambda request: StreamingHttpResponse(iter("x")))(request) for name in ("a", "b")]
    assert (Stage.held(), file.closed) == (2, False)
    request.close()
    assert (Stage.held(), file.closed, len(streams)) == (0, True, 2)


def test_a_page_is_cached_as_without_the_semaphore(stage: str) -> None:
    assert [Client().get("/cached").content for _ in range(2)] == [b"1", b"1"]
    assert_nothing_held(stage, within=0)
