"""``python -m tests.golden``: write the statements anew."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from tests.golden import calls, statements  # noqa: E402 - they need the models

statements.write()
calls.write()
