from __future__ import annotations

from django.urls import path

from tests.places import async_views, views

urlpatterns = [
    path("ping", views.ping),
    path("patient", async_views.patient),
    path("free", async_views.free),
    path("brief", async_views.brief),
    path("stream", async_views.stream),
    path("generated", async_views.generated),
    path("decorated-generator", async_views.decorated_generator),
    path("sync-stream", async_views.sync_stream),
    path("file", async_views.file),
    path("tagged", async_views.tagged),
]
