"""Django's settings for ``python -m benchmarks.overview``: those of the other benchmarks, with the admin."""

from __future__ import annotations

import os

from benchmarks.settings import *  # noqa: F403
from benchmarks.settings import DATABASES as FOUND

ALIAS = os.environ.get("SQLSEM_BENCH_OVERVIEW", "")
DATABASES = {"default": FOUND.get(ALIAS, {})}
if DATABASES["default"].get("ENGINE", "").endswith("postgresql"):
    # What a page costs is to be that of one process, which can be told on a busy machine too.
    DATABASES["default"].setdefault("OPTIONS", {})["options"] = "-c max_parallel_workers_per_gather=0"
# Only what is measured deletes names.
SQLSEM: dict[str, object] = {"FORGET_AFTER": None}
TIME_ZONE = "UTC"
STATIC_URL = "static/"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "benchmarks.overview_settings"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_sqlsem",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]


def __getattr__(name: str) -> object:
    """Make the URLs when they are asked for, since the apps must be ready by then."""
    if name != "urlpatterns":
        raise AttributeError(name)
    from django.contrib import admin
    from django.urls import path

    return [path("admin/", admin.site.urls)]
