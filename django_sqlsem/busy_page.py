"""The page of a busy view: the project's own, or one that goes with any site."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.template import Context, Engine, TemplateDoesNotExist
from django.template.loader import get_template
from django.templatetags.static import static

if TYPE_CHECKING:
    from django.http import HttpRequest

    from django_sqlsem.busy import Busy

PAGE: Final = "sqlsem/busy.html"
#: What the page says, without a page around it.
MESSAGE: Final = "sqlsem/busy_message.html"


def render(busy: Busy, request: HttpRequest, template: str) -> str:
    """Render a template of the project's, in whatever language its engine speaks, or else the library's own."""
    context = {
        "busy": busy,
        "retry_after": busy.retry_after,
        "can_reload": request.method in ("GET", "HEAD"),
        "stylesheet": _stylesheet(),
    }
    try:
        found: Any = get_template(template)
    except TemplateDoesNotExist:  # the templates don't come from the apps, or are Jinja's
        return _engine().get_template(template).render(Context(context))
    return str(found.render(context, request))


@functools.cache
def _engine() -> Engine:
    return Engine(dirs=[str(Path(__file__).parent / "templates")], libraries={"i18n": "django.templatetags.i18n"})


def _stylesheet() -> str:
    """Return the address of the page's style, or nothing: the page must not fail for want of it."""
    if not apps.is_installed("django.contrib.staticfiles"):
        return ""
    try:
        return str(static("sqlsem/busy.css"))
    except Exception:  # noqa: BLE001 - of a storage of the project's: it was not collected
        return ""
