"""The ASGI application: sync and async views side by side."""

from __future__ import annotations

import os

from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

# The handler serves the admin's static files while DEBUG is on; in production the web server does.
application = ASGIStaticFilesHandler(get_asgi_application())
