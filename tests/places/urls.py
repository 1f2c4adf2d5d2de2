from __future__ import annotations

from django.urls import path

from tests.places import views

urlpatterns = [
    path("ping", views.ping),
    path("one", views.one),
    path("resting", views.resting),
    path("patient", views.patient),
    path("raising", views.raising),
    path("for-ever", views.for_ever),
    path("two", views.two),
    path("at-once", views.at_once),
    path("waits", views.waits),
]
