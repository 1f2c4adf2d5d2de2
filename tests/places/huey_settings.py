"""Settings of the processes that run Huey."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "huey.contrib.djhuey"]
_where = os.environ["SQLSEM_TEST_QUEUE"]
_redis = _where.startswith("redis:")
HUEY = {
    "huey_class": "huey.RedisHuey" if _redis else "huey.SqliteHuey",
    "name": os.environ["SQLSEM_TEST_QUEUE_NAME"],
    "immediate": False,
    "connection": {"url": _where} if _redis else {},
    **({} if _redis else {"filename": _where}),
}
