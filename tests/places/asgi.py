from __future__ import annotations

import os

from django.core.asgi import get_asgi_application
from django.utils.module_loading import import_string

#: A function that returns the application, if a test has chosen one.
_CHOSEN = os.environ.get("SQLSEM_TEST_ASGI")

application = import_string(_CHOSEN)() if _CHOSEN else get_asgi_application()
