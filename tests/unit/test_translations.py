"""What visitors read, in their language; a page says which one it is in."""

from __future__ import annotations

import ast
import gettext
import io
import json
from pathlib import Path

import pytest
from django.test import RequestFactory
from django.utils import translation

import django_sqlsem
from django_sqlsem import busy
from django_sqlsem.busy import Busy, busy_response

pytestmark = pytest.mark.process_side

CATALOGUES = sorted(Path(django_sqlsem.__file__).parent.glob("locale/*/LC_MESSAGES/django.po"))
LANGUAGES = ("de", "es", "fr", "pt-br")
rf = RequestFactory()


def catalogue(path):
    return pytest.importorskip("babel.messages.pofile").read_po(io.BytesIO(path.read_bytes()))


def texts():
    """The texts of ``busy`` that are marked for translation."""
    calls = [node for node in ast.walk(ast.parse(Path(busy.__file__).read_text())) if isinstance(node, ast.Call)]
    for call in calls:
        name = getattr(call.func, "id", "")
        words = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if words and name in ("gettext", "gettext_lazy"):
            yield words[0]
        elif name == "ngettext":
            yield tuple(words[:2])
        elif name == "pgettext":
            yield words[1]


def answer(reason, language, accept, method="GET"):
    with translation.override(language):
        request = rf.generic(method, "/", headers={"accept": accept})
        return busy_response(Busy("n", (), 0, 5, reason=reason), request, 503)


def test_there_are_four_languages():
    assert [path.parts[-3] for path in CATALOGUES] == ["de", "es", "fr", "pt_BR"]


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parts[-3])
def test_a_catalogue_has_all_texts_and_no_other(path):
    found = [message for message in catalogue(path) if message.id]
    assert {message.id for message in found} == set(texts())
    assert not [message.id for message in found if message.fuzzy]
    for message in found:
        assert all(message.string if isinstance(message.string, tuple) else [message.string]), message.id


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parts[-3])
def test_what_is_shipped_is_compiled_from_the_text(path):
    compiled = io.BytesIO()
    pytest.importorskip("babel.messages.mofile").write_mo(compiled, catalogue(path))
    compiled.seek(0)
    with path.with_suffix(".mo").open("rb") as file:
        shipped, expected = gettext.GNUTranslations(file)._catalog, gettext.GNUTranslations(compiled)._catalog
    assert {**shipped, "": None} == {**expected, "": None}  # but for the head, which has dates


@pytest.mark.parametrize("reason", sorted(busy.EXPLANATIONS))
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_busy_answer_is_in_the_visitors_language(language, reason):
    page = answer(reason, language, "text/html").content.decode()
    assert f'<html lang="{language}" dir="ltr">' in page
    detail = json.loads(answer(reason, language, "application/json", "POST").content)["detail"]
    for english in (str(busy.TITLES[reason]), str(busy.EXPLANATIONS[reason]), "Nothing was saved", "Please try again"):
        assert english not in page
        assert english not in detail
    assert detail.count("5") == 1


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(("seconds", "number"), [(1799, "30"), (86400, "24")])
def test_a_long_wait_is_told_in_the_visitors_language(language, seconds, number):
    with translation.override(language):
        told = busy.detail(Busy("n", (), 0, seconds, reason="paused"), None)
    assert number in told
    assert str(seconds) not in told
    assert "Please" not in told


@pytest.mark.parametrize("language", ["it", "ar", "en-gb"])
def test_without_a_catalogue_the_page_is_in_english_and_says_so(language):
    page = answer("full", language, "text/html").content.decode()
    assert '<html lang="en" dir="ltr">' in page
    assert "<p>This is busy right now.</p>" in page


def test_the_language_of_a_region_is_that_of_the_language():
    assert '<html lang="de" dir="ltr">' in answer("paused", "de-at", "text/html").content.decode()


def test_a_site_may_add_a_language(settings, tmp_path):
    """Its catalogue is found as Django finds all, and says which language it is: then the page reads from the right."""
    catalogues = pytest.importorskip("babel.messages.catalog")
    arabic = catalogues.Catalog(locale="ar")
    arabic.add("en", "ar", context="the code of the language that you translate to")
    arabic.add("Busy right now", "مشغول الآن")
    folder = tmp_path / "ar" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    with (folder / "django.mo").open("wb") as file:
        pytest.importorskip("babel.messages.mofile").write_mo(file, arabic)
    settings.LOCALE_PATHS = [tmp_path]
    page = answer("full", "ar", "text/html").content.decode()
    assert '<html lang="ar" dir="rtl">' in page
    assert "<title>مشغول الآن</title>" in page
