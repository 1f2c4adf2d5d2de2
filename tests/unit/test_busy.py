from __future__ import annotations

import asyncio
import json
import logging
import re
from html.parser import HTMLParser

import pytest
from asgiref.sync import async_to_sync
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.busy import Busy, busy_response, validate_on_busy
from django_sqlsem.testing import busy, held

rf = RequestFactory()

#: What browsers send for a page.
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@semaphore("busy")
def view(request):
    raise AssertionError("not while it is busy")


@semaphore("busy")
async def view_async(request):
    raise AssertionError("not while it is busy")


@method_decorator(semaphore("busy", on_busy=429), name="dispatch")
class AsyncView(View):
    async def get(self, request):
        raise AssertionError("not while it is busy")


@semaphore("busy", on_busy=lambda busy: JsonResponse({"wait": busy.retry_after}, status=503))
def view_of_its_own(request):
    raise AssertionError("not while it is busy")


async def answer(about):
    await asyncio.sleep(0)
    return JsonResponse({"wait": about.retry_after}, status=503)


@semaphore("busy", on_busy=answer)
async def view_async_of_its_own(request):
    raise AssertionError("not while it is busy")


@semaphore("busy", on_busy="raise")
def strict(request):
    raise AssertionError("not while it is busy")


urlpatterns = [
    path("view", view),
    path("view_async", view_async),
    path("class", AsyncView.as_view()),
    path("own", view_of_its_own),
    path("own_async", view_async_of_its_own),
    path("strict", strict),
]


@pytest.fixture
def urls(db, settings):
    settings.ROOT_URLCONF = __name__


def get(where, asynchronous=False, **headers):
    if asynchronous:
        return async_to_sync(AsyncClient(raise_request_exception=False).get)(where, headers=headers)
    return Client(raise_request_exception=False).get(where, headers=headers)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("where", "status"), [("/view", 503), ("/view_async", 503), ("/class", 429)])
def test_the_answer_of_a_busy_view(urls, where, status, asynchronous):
    with busy("busy"):
        response = get(where, asynchronous, accept="application/json")
    assert response.status_code == status
    assert response["Retry-After"] == "1"
    assert response["Cache-Control"] == "no-store"
    assert "Accept" in response["Vary"]
    body = response.json()
    assert (body["error"], body["retry_after"]) == ("busy", 1)
    assert "try again in 1 second." in body["detail"]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (BROWSER, "text/html"),
        ("text/html", "text/html"),
        ("application/json", "application/json"),
        ("*/*", "application/json"),
        ("image/png", "application/json"),
        ("", "application/json"),
        ("application/json;q=0.5, text/html;q=0.4", "application/json"),
        ("application/json;q=0.4, text/html;q=0.5", "text/html"),
        ("text/*", "text/html"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_json_or_a_page_as_the_visitor_prefers(urls, accept, kind, asynchronous):
    with busy("busy"):
        response = get("/view_async" if asynchronous else "/view", asynchronous, accept=accept)
    assert response["Content-Type"].startswith(kind)


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes = [], {}
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes[tag] = dict(attributes)


def test_the_page_says_when_and_has_no_inline_style_or_script(urls):
    with held("busy", total=1) as [permit], busy("busy"):
        page = get("/view", accept=BROWSER).content.decode()
        holder = semaphore("busy").status().holders[0]
        assert permit.slot == 1
    tags = Tags(page)
    assert "Please try again in 1 second." in page
    assert not {"style", "script", "img", "iframe"} & set(tags.tags)
    assert tags.attributes["link"] == {"rel": "stylesheet", "href": "/static/sqlsem/busy.css"}
    assert not any("style" in found or any(key.startswith("on") for key in found) for found in tags.attributes.values())
    assert tags.attributes["html"] == {"lang": "en", "dir": "ltr"}
    assert tags.attributes["a"] == {"class": "sqlsem-again", "href": ""}
    for secret in (holder.host, str(holder.token), "busy<", "&#x27;busy&#x27;"):
        assert secret not in page


def test_the_page_counts_seconds_and_offers_no_reload_after_a_form():
    about = Busy("secret-name", (), 3, 12)
    page = busy_response(about, rf.get("/", headers={"accept": BROWSER}), 503).content.decode()
    assert "Please try again in 12 seconds." in page
    assert "secret-name" not in page
    assert "<a " in page
    assert "Nothing was saved." not in page
    posted = busy_response(about, rf.post("/", headers={"accept": BROWSER}), 503).content.decode()
    assert "<p>This is busy right now. Nothing was saved.</p>" in posted
    assert "<a " not in posted


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (1, "in 1 second."),
        (119, "in 119 seconds."),
        (120, "in about 2 minutes."),
        (1799, "in about 30 minutes."),
        (7199, "in about 120 minutes."),
        (7200, "in about 2 hours."),
        (86400, "in about 24 hours."),
    ],
)
def test_a_long_wait_is_told_in_minutes_or_hours(seconds, told):
    about = Busy("n", (), 0, seconds, reason="paused")
    response = busy_response(about, rf.get("/", headers={"accept": BROWSER}), 503)
    assert f"Please try again {told}" in response.content.decode()
    assert response["Retry-After"] == str(seconds)


def test_a_project_may_have_its_own_page(urls, tmp_path, settings):
    (tmp_path / "sqlsem").mkdir()
    (tmp_path / "sqlsem" / "busy.html").write_text("{{ busy.name }} {{ retry_after }} {{ request.path }} {{ user }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    with busy("busy"):
        for asynchronous in (False, True):
            where = "/view_async" if asynchronous else "/view"
            assert get(where, asynchronous, accept=BROWSER).content.decode() == f"busy 1 {where} AnonymousUser"


def test_a_project_without_templates_still_answers():
    with override_settings(TEMPLATES=[]):
        response = busy_response(Busy("n", (), 0, 5), rf.get("/", headers={"accept": BROWSER}), 503)
    assert b"Please try again in 5 seconds." in response.content


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["/view", "/view_async", "/class", "/own", "/own_async"])
def test_one_warning_and_no_mail_to_the_admins(urls, caplog, settings, where, asynchronous):
    settings.ADMINS = [("Admin", "admin@example.com")]
    with busy("busy"), caplog.at_level(logging.DEBUG):
        response = get(where, asynchronous)
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (record.name, record.levelname) == ("django_sqlsem", "WARNING")
    told = f"Busy: GET {where} was answered {response.status_code}, because 'busy' was made busy by a test."
    assert record.getMessage() == told
    assert record.status_code == response.status_code
    assert record.request.path == where
    assert mail.outbox == []


def test_line_breaks_in_a_path_stay_out_of_the_log(urls, caplog):
    with busy("busy"):
        view(rf.get("/a%0Ab"))
    assert "GET /a\\nb was answered 503" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["/own", "/own_async"])
def test_a_callable_answers_itself(urls, where, asynchronous):
    with busy("busy"):
        response = get(where, asynchronous)
    assert (response.status_code, response.json()) == (503, {"wait": 1})


def test_a_callable_gets_what_the_error_knows(db):
    seen = []

    @semaphore("busy", slots=2, timeout=0, on_busy=lambda about: seen.append(about) or "other")
    def f():
        raise AssertionError

    with held("busy", total=2):
        assert f() == "other"
    [about] = seen
    assert isinstance(about, Busy)
    assert (about.name, len(about.holders), about.waiting) == ("busy", 2, 0)
    assert isinstance(about.retry_after, int)
    with pytest.raises(AttributeError):
        about.name = "other"


def test_raise_reaches_the_caller(urls):
    with busy("busy"):
        assert get("/strict").status_code == 500
        with pytest.raises(AcquireTimeoutError, match="busy"):
            strict(rf.get("/"))
        with pytest.raises(AcquireTimeoutError):
            semaphore("busy")(lambda: None)()
        with pytest.raises(AcquireTimeoutError):
            semaphore("busy", on_busy=429)(lambda: None)()  # a status is for views


@pytest.mark.parametrize("asynchronous", [False, True])
def test_skip(db, asynchronous):
    @semaphore("busy", on_busy="skip")
    def f():
        raise AssertionError

    @semaphore("busy", on_busy="skip")
    async def c():
        raise AssertionError

    with busy("busy"):
        assert (asyncio.run(c()) if asynchronous else f()) is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_view_that_would_skip_is_refused_even_when_it_is_not_busy(db, asynchronous):
    @semaphore("busy", on_busy="skip")
    def f(request):
        raise AssertionError

    @semaphore("busy", on_busy="skip")
    async def c(request):
        raise AssertionError

    with pytest.raises(ImproperlyConfigured, match=r'on_busy="skip" is for functions and tasks'):
        asyncio.run(c(rf.get("/"))) if asynchronous else f(rf.get("/"))


def test_a_view_that_would_retry_asks_the_visitor_to(db):
    retried = semaphore("busy", on_busy="retry")(lambda request: HttpResponse())
    with busy("busy"):
        response = retried(rf.get("/"))
    assert (response.status_code, response["Retry-After"]) == (503, "1")


def test_the_status_of_the_settings(urls, settings):
    settings.SQLSEM = {"BUSY_STATUS": 423}
    with busy("busy"):
        assert get("/view").status_code == 423
        assert get("/class").status_code == 429


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 1), (0.2, 1), (1, 1), (1.01, 2), (59.5, 60), (-3, 1), (float("inf"), 1), (float("nan"), 1)],
)
def test_retry_after_is_a_whole_number_of_seconds(seconds, expected):
    found = Busy.from_error(AcquireTimeoutError(name="n", waiting=2, retry_after=seconds)).retry_after
    assert found == expected
    assert type(found) is int
    json.dumps(found)


@pytest.mark.parametrize("value", [None, 400, 429, 503, 599, "raise", "skip", "retry", print, Busy])
def test_what_on_busy_may_be(value):
    assert validate_on_busy(value) is value
    assert semaphore("x", on_busy=value).on_busy is value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (200, ValueError),
        (399, ValueError),
        (600, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (False, TypeError),
        (503.0, TypeError),
        ("", ValueError),
        ("Skip", ValueError),
        ("503", ValueError),
        (b"skip", TypeError),
        (["skip"], TypeError),
        (HttpResponse(status=503), TypeError),
    ],
)
def test_what_on_busy_may_not_be(value, error):
    with pytest.raises(error, match=re.escape(repr(value))) as caught:
        semaphore("x", on_busy=value)
    for allowed in ("400 to 599", "'raise'", "'skip'", "'retry'", "callable", "None"):
        assert allowed in str(caught.value)
