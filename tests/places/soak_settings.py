"""Settings of the servers and workers of the soak test."""

from __future__ import annotations

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.places.soak_urls"
MIDDLEWARE = []
