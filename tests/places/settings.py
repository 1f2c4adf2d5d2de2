"""Settings of the sites in ``tests.places.site``: the tests' own, with what a test has asked for in the environment."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

#: The module of urls that the test has chosen.
ROOT_URLCONF = os.environ.get("SQLSEM_TEST_URLS", "tests.places.urls")
#: The middleware that the test has chosen; none by default, so that nothing but the view makes queries.
MIDDLEWARE = json.loads(os.environ.get("SQLSEM_TEST_MIDDLEWARE", "[]"))
for _database in DATABASES.values():
    _database["ATOMIC_REQUESTS"] = bool(os.environ.get("SQLSEM_TEST_ATOMIC_REQUESTS"))

# In the server's log: what the library says with its kind, and Django's errors. Tests read it.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "own": {
            "format": "[%(name)s %(levelname)s %(what)s] %(message)s",
            "defaults": {"what": "-"},
        }
    },
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "own"}},
    "loggers": {
        "django_sqlsem": {"handlers": ["console"], "level": "INFO"},
        "django.request": {"handlers": ["console"], "level": "WARNING"},
    },
}
