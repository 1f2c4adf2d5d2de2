"""Busy answers in Django REST framework, django-ninja, Jinja2 and HTMX, and the order of what they do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from django.core import mail
from django.test import Client, RequestFactory
from django.urls import path as url
from django.utils import translation

from django_sqlsem import semaphore
from django_sqlsem.busy import Busy, busy_response
from django_sqlsem.testing import busy
from tests.e2e.test_docs import run_page
from tests.support.databases import ROOT

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
REST = [
    "handler",
    "dispatched",
    "around",
    "around-set",
    "models",
    "router/rows/",
    "router/rows/extra/",
]
rf = RequestFactory()


@pytest.fixture(autouse=True)
def _urls(db: None, settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.places.frameworks_views"
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "rest_framework"]


def get(where: str, **headers: str) -> Any:
    return Client(raise_request_exception=False).get(f"/{where}", headers=headers)


# Django REST framework.


@pytest.mark.parametrize("where", REST)
def test_a_rest_view_answers_in_its_frameworks_way(where: str, caplog: Any, settings: Any) -> None:
    settings.ADMINS = [("Admin", "admin@example.com")]
    with busy("place"), caplog.at_level(logging.WARNING):
        plain, page = get(where), get(where, accept=BROWSER)
    for response in (plain, page):
        assert (response.status_code, response["Retry-After"], response["Cache-Control"]) == (503, "1", "no-store")
    assert plain["Content-Type"] == "application/json"
    assert plain.json() == {"detail": "This is busy right now. Please try again in 1 second."}
    assert page["Content-Type"].startswith("text/html")
    assert "Django REST framework" in page.content.decode()
    assert "HTTP 503" in page.content.decode()
    assert [record.name for record in caplog.records] == ["django_sqlsem"] * 2
    assert mail.outbox == []
    assert semaphore("place").status().held == 0


def test_a_bad_login_is_no_obstacle_to_the_page() -> None:
    with busy("place"):
        assert get("dispatched", accept=BROWSER, x_user="bad").status_code == 503
    assert get("dispatched", accept=BROWSER, x_user="bad").status_code == 401


def test_an_exception_handler_of_the_projects() -> None:
    with busy("place"):
        own, silent = get("own-handler"), get("silent-handler")
    assert own.json() == {"problem": "busy", "view": "OwnHandler"}
    assert silent.json()["error"] == "busy"
    for response in (own, silent):
        assert (response.status_code, response["Retry-After"]) == (503, "1")


def test_whoever_is_refused_takes_no_slot_and_names_have_the_frameworks_user() -> None:
    with busy("user:7"):
        assert get("function").status_code == 401
        assert get("function", x_user="bad").status_code == 401
        assert get("function?refuse", x_user="7")["Retry-After"] == "33"
        assert get("function", x_user="7").status_code == 503
        assert get("function", x_user="8").json() == {"user": 8}


def test_above_dispatch_the_user_is_an_error_and_not_everybody() -> None:
    with pytest.raises(ValueError, match=r"request\.user\.pk"):
        Client().get("/dispatched-per-user", headers={"x-user": "7"})


# django-ninja.


@pytest.mark.parametrize("where", ["ninja/sync", "ninja-async/async"])
@pytest.mark.parametrize("accept", ["*/*", BROWSER, ""])
def test_an_operation_answers_json(where: str, accept: str) -> None:
    assert get(f"{where}?number=4").json() == {"number": 4}
    with busy("place"):
        response = get(where, accept=accept)
    assert (response.status_code, response["Retry-After"], response["Content-Type"]) == (503, "1", "application/json")
    assert response.json()["error"] == "busy"


def test_an_operation_may_leave_its_busy_answer_to_ninja() -> None:
    with busy("place"):
        response = get("ninja/own")
    assert (response.status_code, response.json()) == (503, {"wait": 1})


def test_annotations_that_are_text_reach_ninja() -> None:
    response = Client().post("/ninja/typed", {"number": 4}, content_type="application/json")
    assert (response.status_code, response.json()) == (200, {"number": 5})


# What on_busy may not answer.


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("nothing", TypeError, "on_busy <function .*> of the view of_on_busy.* must return an HttpResponse, not None"),
        ("words", TypeError, "must return an HttpResponse, not 'busy'"),
        ("later", TypeError, "on_busy <function later .*> is asynchronous, but the view of_on_busy.* is not"),
        ("fails", ZeroDivisionError, "of on_busy"),
    ],
)
def test_an_on_busy_that_cannot_answer(where: str, error: type[Exception], words: str) -> None:
    with busy("place"), pytest.raises(error, match=words):
        Client().get(f"/{where}")
    assert semaphore("place").status().held == 0


def test_an_on_busy_knows_the_request() -> None:
    with busy("place"):
        assert get("request").json() == {"path": "/request"}


def test_a_function_that_only_gets_the_request_may_answer_anything() -> None:
    with busy("place"):
        assert semaphore("place", on_busy=lambda about: "old")(lambda request: "new")(rf.get("/")) == "old"


# Pages.

ABOUT = Busy("secret", (), 0, 5)
JINJA = "django.template.backends.jinja2.Jinja2"
DJANGO = "django.template.backends.django.DjangoTemplates"


def page(**headers: str) -> Any:
    return busy_response(ABOUT, rf.get("/", headers={"accept": BROWSER, **headers}), 503)


@pytest.mark.parametrize("app_dirs", [True, False])
def test_a_project_with_jinja_alone_gets_the_whole_page(settings: Any, app_dirs: bool) -> None:
    settings.TEMPLATES = [{"BACKEND": JINJA, "APP_DIRS": app_dirs}]
    body = page().content.decode()
    assert '<html lang="en" dir="ltr">' in body
    assert "try again in 5 seconds." in body


def test_a_project_with_jinja_first_may_have_its_own_page(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "sqlsem").mkdir()
    (tmp_path / "base.html").write_text("<title>Site</title>{% block content %}{% endblock %}")
    settings.TEMPLATES = [{"BACKEND": JINJA, "DIRS": [tmp_path]}, {"BACKEND": DJANGO, "APP_DIRS": True}]
    assert "<title>Busy right now</title>" in page().content.decode()
    template = blocks_of("frameworks.md", "## Jinja2")
    (tmp_path / "sqlsem" / "busy.html").write_text(template)
    body = page().content.decode()
    assert "<title>Site</title>" in body
    assert "try again in 5 seconds." in body
    assert 'href=""' in body


def test_the_page_in_the_sites_looks(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "sqlsem").mkdir()
    (tmp_path / "base.html").write_text("<title>Site</title>{% block content %}{% endblock %}")
    (tmp_path / "sqlsem" / "busy.html").write_text(blocks_of("views.md", "have it in"))
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    body = page().content.decode()
    assert body.startswith("<title>Site</title>")
    assert "try again in 5 seconds." in body


def blocks_of(name: str, after: str) -> str:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return text[text.index(after) :].split("```html\n")[1].split("```")[0]


def test_a_page_that_cannot_be_made_says_so(settings: Any, tmp_path: Path) -> None:
    from django.template import TemplateDoesNotExist

    (tmp_path / "sqlsem").mkdir()
    (tmp_path / "sqlsem" / "busy.html").write_text('{% extends "no-such.html" %}')
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    with pytest.raises(TemplateDoesNotExist, match=r"no-such\.html"):
        page()


@pytest.mark.parametrize("storage", ["Manifest", ""])
def test_the_style_is_left_out_where_it_cannot_be_found(settings: Any, tmp_path: Path, storage: str) -> None:
    if storage:
        settings.STATIC_ROOT = tmp_path
        backend = "django.contrib.staticfiles.storage.ManifestStaticFilesStorage"
        settings.STORAGES = {**settings.STORAGES, "staticfiles": {"BACKEND": backend}}
    else:
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if "staticfiles" not in app]
    body = page().content.decode()
    assert "<link" not in body
    assert "try again in 5 seconds." in body


def test_htmx_gets_the_text_alone() -> None:
    part = page(accept="*/*", hx_request="true")
    assert part["Content-Type"].startswith("text/html")
    assert "<html" not in part.content.decode()
    assert "try again in 5 seconds." in part.content.decode()
    assert "<html" in page(hx_request="true", hx_boosted="true").content.decode()
    for response in (part, page()):
        assert {"Accept", "HX-Request"} <= {each.strip() for each in response["Vary"].split(",")}


@pytest.mark.parametrize(
    "accept", [";;;", "text/html;q=abc", "text/html;q=NaN", "/", "*", "a/b/c", ",", "\x00", "é" * 9]
)
def test_odd_words_in_accept_are_answered(accept: str) -> None:
    assert page(accept=accept).status_code == 503


@pytest.mark.parametrize("accept", [BROWSER, "application/json"])
def test_middleware_and_decorators_around_a_busy_answer(settings: Any, accept: str) -> None:
    from django.http import HttpResponse
    from django.views.decorators.cache import cache_page, never_cache

    @never_cache
    @cache_page(60)
    @semaphore("place", timeout=0)
    def view(request: Any) -> Any:
        return HttpResponse("x" * 999)

    class Urls:
        urlpatterns = [url("view", view)]

    settings.ROOT_URLCONF = Urls
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": accept}}
    settings.MIDDLEWARE = [
        "django.middleware.gzip.GZipMiddleware",
        "django.middleware.http.ConditionalGetMiddleware",
        "django.middleware.locale.LocaleMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
    ]
    with busy("place"), translation.override(None):  # the client leaves the language of its requests on
        found = get("view", accept=accept, accept_encoding="gzip", accept_language="de")
        head = Client().head("/view", headers={"accept": accept})
    assert (found.status_code, found["Retry-After"], found["X-Frame-Options"]) == (503, "1", "DENY")
    assert "no-store" in found["Cache-Control"]
    assert "Accept" in found["Vary"]
    assert (head.status_code, head["Retry-After"], head.content) == (503, "1", b"")
    if accept == BROWSER:
        import gzip

        assert b'<html lang="de" dir="ltr">' in gzip.decompress(found.content)
    with translation.override(None):
        assert get("view", accept=accept).content == b"x" * 999  # the busy answer was not kept


def test_the_examples_of_the_documentation(settings: Any) -> None:
    page = run_page(ROOT / "docs" / "frameworks.md")

    class Urls:
        urlpatterns = [
            url("reports", page["Reports"].as_view()),
            url("files", page["Files"].as_view({"post": "take"})),
            url("api/", page["api"].urls),
        ]

    settings.ROOT_URLCONF = Urls
    assert get("reports").json() == {"rows": []}
    assert Client().post("/files").json() == {"taken": True}
    assert get("api/reports?year=2027").json() == {"year": 2027}
    with busy("reports"), busy("import"):
        assert get("reports").status_code == Client().post("/files").status_code == 503
        assert get("api/reports").json()["error"] == "busy"
