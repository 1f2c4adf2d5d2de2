"""A site for gunicorn's gevent workers: views that hold, and one that says whether the process still answers."""

from __future__ import annotations

import os
import threading
import time

from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_sqlsem import semaphore
from tests.places.celery_workers import lock_alias
from tests.support.databases import OutsideCounter


@semaphore("gevent-site", slots=2, timeout=60)
def hold(request: HttpRequest) -> HttpResponse:
    with OutsideCounter(lock_alias(), "gevent-site") as counter, counter.inside():
        time.sleep(float(request.GET["seconds"]))
    return HttpResponse(f"{os.getpid()} {threading.get_ident()}")


@semaphore("gevent-site", slots=2, timeout=0)
def refused(request: HttpRequest) -> HttpResponse:
    return HttpResponse("held")


def alive(request: HttpRequest) -> HttpResponse:
    return HttpResponse(f"{os.getpid()}")


urlpatterns = [path("hold", hold), path("refused", refused), path("alive", alive)]
application = get_wsgi_application()
