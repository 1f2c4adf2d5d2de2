from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()

if os.environ.get("SQLSEM_TEST_BEFORE_FORK"):
    # With --preload this runs in the parent of all workers. It holds one slot of two, for as long as it lives.
    from django_sqlsem import semaphore

    PERMIT = semaphore("two", slots=2).acquire()
    PERMIT.detach()
