"""The tests' settings with the urls of the site that gunicorn's gevent workers serve."""

from __future__ import annotations

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.places.gevent_site"
