"""Django's settings of every process of a benchmark: its databases come from the environment of the first one."""

from __future__ import annotations

import importlib.util
import json
import os

from benchmarks import ENVIRONMENT, SILENT, UNRECORDED

DATABASES = json.loads(os.environ.get(ENVIRONMENT, "{}"))
if any(database.get("ENGINE", "").endswith(".mysql") for database in DATABASES.values()):
    from tests.support.servers import install_mysql_driver

    install_mysql_driver()
_locked = {alias: database for alias, database in DATABASES.items() if database.get("ENGINE") == "mssql"}
_twins = {f"{alias}{SILENT}": database for alias, database in DATABASES.items() if "ENGINE" in database}
_unrecorded = {f"{alias}{UNRECORDED}": database for alias, database in _locked.items()}
DATABASES |= _twins | _unrecorded
SQLSEM = {
    "DATABASES": {alias: {"RECORD": False} for alias in _unrecorded} | {alias: {"HISTORY": False} for alias in _twins}
}
DATABASE_CONNECTION_POOLING = False

SECRET_KEY = "for benchmarks only"  # noqa: S105 - it signs nothing
USE_TZ = True
TIME_ZONE = None  # the machine's own, for the lines that say when
DEBUG = False
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_sqlsem"] + [
    app for app in ("db_mutex", "pgactivity", "pglock") if importlib.util.find_spec(app)
]
