"""Settings of the example project: SQLite without a word, any other database by ``DATABASE_URL``.

``EXAMPLE_VAR_DIR`` says where the database file, the broker's messages and the logs go (default: ``var/``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dj_database_url

BASE_DIR = Path(__file__).resolve().parent.parent
VAR_DIR = Path(os.environ.get("EXAMPLE_VAR_DIR") or BASE_DIR / "var").resolve()
VAR_DIR.mkdir(parents=True, exist_ok=True)

DEBUG = True  # an example on 127.0.0.1: never put these three on a server
SECRET_KEY = "for-the-example-project-only"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_sqlsem",  # this line and `migrate` are the whole installation
    "example_project.reports",  # what a user writes
    "example_project.demo",  # what puts it under load: `manage.py demo`
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "example_project.urls"
ASGI_APPLICATION = "example_project.asgi.application"
WSGI_APPLICATION = "example_project.wsgi.application"

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


def _database(url: str) -> dict[str, Any]:
    """Return the settings of the database at ``url``, with what SQLite and MariaDB need to be used in earnest."""
    database: dict[str, Any] = {**dj_database_url.parse(url)}
    if database["ENGINE"] == "django.db.backends.sqlite3":
        database["OPTIONS"] = {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",  # a writer waits for its turn at BEGIN, instead of failing later
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL",
        }
    if database["ENGINE"] == "django.db.backends.mysql":
        database["OPTIONS"] = {"charset": "utf8mb4", **database.get("OPTIONS", {})}
        try:
            import MySQLdb  # noqa: F401  (mysqlclient)
        except ImportError:
            import pymysql  # pure Python

            pymysql.version_info = max(pymysql.version_info, (2, 2, 1, "final", 0))  # what Django 6 asks of mysqlclient
            pymysql.install_as_MySQLdb()
            if database["HOST"] in {"127.0.0.1", "localhost"}:  # PyMySQL spends 40 ms per connection on TLS settings
                database["OPTIONS"].setdefault("ssl_disabled", True)
    return database


DATABASES = {"default": _database(os.environ.get("DATABASE_URL") or f"sqlite:///{VAR_DIR / 'db.sqlite3'}")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

SQLSEM = {"DEADLOCKS": "break"}  # of two who wait for each other, the later one raises DeadlockError

# Celery without a server: its messages are files (see demo/broker.py). Any other broker works as well.
_BROKER_DIR = VAR_DIR / "broker"
_BROKER_DIR.mkdir(exist_ok=True)
CELERY_BROKER_URL = "folder://localhost"
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "data_folder_in": str(_BROKER_DIR),
    "data_folder_out": str(_BROKER_DIR),
    "control_folder": str(_BROKER_DIR / "control"),
    "polling_interval": 0.1,
}
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False

LANGUAGE_CODE = "en"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "{asctime} {process} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"handlers": ["console"], "level": "INFO"},
    "loggers": {"django": {"level": "INFO"}},  # by the root's handler alone, not twice
}
