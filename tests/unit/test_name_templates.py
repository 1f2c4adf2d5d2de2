from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.test import RequestFactory
from django.utils.functional import SimpleLazyObject
from hypothesis import given
from hypothesis import strategies as st

from django_sqlsem.core.templates import Template, django_request, resolved_user


def test_a_name_without_fields_is_itself():
    assert Template.parse("reports").expand({}) == "reports"
    assert Template.parse("reports").fields == ()
    assert Template.parse("").expand({}) == ""


@pytest.mark.parametrize(
    ("source", "expanded"),
    [
        ("sync:{request.user.pk}", "sync:7"),
        ("{a}", "one"),
        ("{a}{a}-{b}", "oneone-2"),
        ("{{a}}", "{a}"),
        ("{{{a}}}", "{one}"),
        ("{{}}", "{}"),
        ("ünï:{a}:☃", "ünï:one:☃"),
        ("{größe}", "xl"),
    ],
)
def test_fields_are_filled_in_and_doubled_braces_are_braces(source, expanded):
    arguments = {"a": "one", "b": 2, "größe": "xl", "request": SimpleNamespace(user=SimpleNamespace(pk=7))}
    assert Template.parse(source).expand(arguments) == expanded
    assert asyncio.run(Template.parse(source).aexpand(arguments)) == expanded


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x{}", "never positional"),
        ("x{0}", "not an argument's name"),
        ("x{0.a}", "not an argument's name"),
        ("x{a!r}", "conversion or a format"),
        ("x{a:>9}", "conversion or a format"),
        ("x{a:}", "conversion or a format"),
        ("x{a[0]}", "has an index"),
        ("x{_a}", "leading underscore"),
        ("x{a._b.c}", "leading underscore"),
        ("x{a.__class__}", "leading underscore"),
        ("x{a..b}", "not an argument's name"),
        ("x{a.}", "not an argument's name"),
        ("x{ a }", "not an argument's name"),
        ("x{a b}", "not an argument's name"),
        ("x{a()}", "not an argument's name"),
    ],
)
def test_anything_but_plain_attributes_is_refused(source, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        Template.parse(source)
    assert repr(source) in str(caught.value)
    assert source[1:] in str(caught.value)


@pytest.mark.parametrize("source", ["{", "}", "a{b", "a}b", "{a}}", "{{a}", "{a{b}}"])
def test_a_single_brace_is_refused(source):
    with pytest.raises(ValueError, match=r"single '[{}]'") as caught:
        Template.parse(source)
    assert repr(source) in str(caught.value)


class Plain:
    pass


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "is missing"),
        ({"a": None}, "is None"),
        ({"a": SimpleNamespace()}, "is missing"),
        ({"a": SimpleNamespace(b=None)}, "is None"),
        ({"a": SimpleNamespace(b="")}, "is empty"),
        ({"a": SimpleNamespace(b="text".upper)}, "something to call"),
        ({"a": SimpleNamespace(b=Plain)}, "something to call"),
        ({"a": SimpleNamespace(b=Plain())}, "a Plain, which has no text of its own"),
        ({"a": SimpleNamespace(b=SimpleLazyObject(lambda: None))}, "is None"),
        ({"a": {"b": 1}}, "is missing"),
    ],
)
def test_a_field_that_would_be_shared_by_everybody_is_an_error(arguments, problem):
    template = Template.parse("x:{a.b}")
    with pytest.raises(ValueError, match=problem) as caught:
        template.expand(arguments)
    assert "'a.b'" in str(caught.value)
    assert "'x:{a.b}'" in str(caught.value)
    with pytest.raises(ValueError, match=problem):
        asyncio.run(template.aexpand(arguments))


def test_anonymous_users_do_not_share_a_slot():
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    with pytest.raises(ValueError, match=r"'request\.user\.pk'.* is None"):
        Template.parse("sync:{request.user.pk}").expand({"request": request})


def test_values_of_many_types():
    some = uuid.uuid4()
    values = {"a": 0, "b": False, "c": some, "d": SimpleLazyObject(lambda: User(username="ann")), "e": 1.5}
    assert Template.parse("{a} {b} {c} {d} {e}").expand(values) == f"0 False {some} ann 1.5"


def test_an_async_view_asks_for_the_user_asynchronously():
    async def auser():
        return User(pk=5)

    def forbidden():
        raise AssertionError("a query in a coroutine")

    request = RequestFactory().get("/")
    request.auser = auser
    template = Template.parse("sync:{request.user.pk}")
    assert asyncio.run(template.aexpand({"request": request})) == "sync:5"
    request.user = SimpleLazyObject(forbidden)
    assert asyncio.run(template.aexpand({"request": request})) == "sync:5"
    request.user = User(pk=6)  # a middleware of the project's own
    assert asyncio.run(template.aexpand({"request": request})) == "sync:6"


def test_an_async_view_without_auser_uses_the_user():
    request = RequestFactory().get("/")
    template = Template.parse("sync:{request.user.pk}")
    with pytest.raises(ValueError, match="is missing"):
        asyncio.run(template.aexpand({"request": request}))
    request.user = SimpleLazyObject(lambda: User(pk=6))
    assert asyncio.run(template.aexpand({"request": request})) == "sync:6"


class RestRequest:
    """Looks as Django REST framework's request does."""

    def __init__(self, request):
        self._request = request

    @property
    def user(self):
        return User(pk=8)


def test_a_rest_framework_request_authenticates_in_its_own_way():
    async def auser():
        raise AssertionError("not Django's user")

    inner = RequestFactory().get("/")
    inner.auser = auser
    request = RestRequest(inner)
    template = Template.parse("sync:{request.user.pk}")
    assert template.expand({"request": request}) == "sync:8"
    assert asyncio.run(template.aexpand({"request": request})) == "sync:8"
    assert django_request(request) is inner


def test_looking_for_a_request_evaluates_nothing_lazy():
    def forbidden():
        raise AssertionError("evaluated")

    assert django_request(SimpleLazyObject(forbidden)) is None
    assert django_request(None) is None
    assert django_request(RequestFactory) is None
    request = RequestFactory().get("/")
    request.user = SimpleLazyObject(forbidden)
    assert resolved_user(request) is None


@given(st.text())
def test_any_text_parses_or_is_refused_and_escaped_text_is_literal(text):
    try:
        Template.parse(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert Template.parse(escaped).expand({}) == text


def test_a_visitor_who_is_not_logged_in_is_told_of():
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    template = Template.parse("sync:{request.user.pk}")
    with pytest.raises(ValueError, match=r"\(nobody is logged in\? Put login_required above the semaphore\)\.$"):
        template.expand({"request": request})
