"""Settings of the site that the browser visits: the tests' own, with a strict content security policy."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, INSTALLED_APPS, MIDDLEWARE

MIDDLEWARE = ["tests.e2e.browser.policy.ContentSecurityPolicy", *MIDDLEWARE]
#: django-unfold's own pages need inline scripts: there is no policy then.
STRICT = not os.environ.get("SQLSEM_TEST_UNFOLD")
if not STRICT:
    INSTALLED_APPS = ["unfold", *INSTALLED_APPS]
for _database in DATABASES.values():
    _database["ATOMIC_REQUESTS"] = True  # an act must count all the same

# The reason for an answer 500 is in the server's log, which a failing test shows.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"django.request": {"handlers": ["console"], "level": "ERROR"}},
}
