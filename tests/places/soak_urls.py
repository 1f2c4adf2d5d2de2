from __future__ import annotations

import asyncio
import time

from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_sqlsem import semaphore
from tests.places.presence import SLOTS, inside


def ping(request: HttpRequest) -> HttpResponse:
    return HttpResponse("pong")


@semaphore("soak", slots=SLOTS, timeout=3)
def sync_view(request: HttpRequest, place: str) -> HttpResponse:
    with inside(place):
        time.sleep(float(request.GET["hold"]))
    return HttpResponse("done")


@semaphore("soak", slots=SLOTS, timeout=3)
async def async_view(request: HttpRequest, place: str) -> HttpResponse:
    with inside(place):  # a few statements on the loop's own thread
        await asyncio.sleep(float(request.GET["hold"]))
    return HttpResponse("done")


urlpatterns = [
    path("ping", ping),
    path("sync/<place>", sync_view),
    path("async/<place>", async_view),
]
