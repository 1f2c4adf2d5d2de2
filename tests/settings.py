"""Settings of the tests: SQLite in a file as ``default``, and every server that can be reached.

A child process of a test finds its parent's test databases in ``SQLSEM_TEST_DATABASES`` and looks for nothing.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from tests.support import servers

FOUND: dict[str, servers.Found] = {}
MISSING: dict[str, servers.Missing] = {}

servers.install_mysql_driver()  # also for servers that a test starts by itself

if "SQLSEM_TEST_DATABASES" in os.environ:
    DATABASES = servers.given_databases()
else:
    FOUND, MISSING = servers.survey()
    _directory = tempfile.mkdtemp(prefix="sqlsem-tests-", dir=servers.directory_in_memory())

    def _remove(directory: str = _directory, pid: int = os.getpid()) -> None:
        if os.getpid() == pid:  # not at the exit of a forked child
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(_remove)
    DATABASES = {"default": servers.sqlite_settings(_directory)}
    DATABASES |= {name: servers.database_settings(name) for name in servers.DATABASES if name in FOUND}

DATABASE_CONNECTION_POOLING = False  # as mssql-django's users with locks must have it

SQLSEM = servers.given_settings()

SECRET_KEY = "for tests only"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.testapp.urls"
STATIC_URL = "/static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_sqlsem",
    "tests.testapp",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
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
            ],
        },
    },
]
