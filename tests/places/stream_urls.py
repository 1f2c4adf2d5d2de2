from __future__ import annotations

from django.urls import path

from tests.places import stream_views, views

urlpatterns = [
    path("ping", views.ping),
    path("stream", stream_views.stream),
    path("refused", stream_views.refused),
    path("file", stream_views.file),
]
