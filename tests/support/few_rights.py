"""``SQLSEM_TEST_FEW_RIGHTS=1``: Django and the library log in as roles with the rights of docs/databases.md alone.

What tests do themselves beside them, by raw connections, is done by the owner as ever.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.apps import apps
from django.db import connections

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "databases.md"
ASKED = os.environ.get("SQLSEM_TEST_FEW_RIGHTS") == "1"
ROLE = "sqlsem_few_rights"
#: The owner's settings of each alias that has a role.
OWNERS: dict[str, dict[str, Any]] = {}


def grants(kind: str) -> list[str]:
    """Return the statements of the page for this kind of server."""
    ours = "shop." if kind == "mariadb" else "sqlsem_event, "
    texts = re.findall(r"^```sql\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = [each for each in texts if "GRANT" in each and ours in each]
    return [each.strip() for each in re.sub("--.*", "", found).split(";") if each.strip()]


@contextlib.contextmanager
def granted(alias: str) -> Iterator[None]:
    """Have an alias log in as the role inside the block."""
    connection = connections[alias]
    kind = "mariadb" if connection.vendor == "mysql" else "postgres"
    tables = [each._meta.db_table for each in apps.get_models(include_auto_created=True)]
    own = [each for each in tables if not each.startswith("sqlsem_")]
    with connection.cursor() as cursor:
        if kind == "mariadb":
            cursor.execute(f"CREATE USER IF NOT EXISTS {ROLE}")
        else:
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [ROLE])
            if cursor.fetchone() is None:
                cursor.execute(f"CREATE ROLE {ROLE}")
        database = connection.settings_dict["NAME"]
        for statement in grants(kind):
            statement = re.sub(r"TO shop$", f"TO {ROLE}", statement).replace("shop.", f"{database}.")
            cursor.execute(statement)
        for table in own:  # a site's own
            cursor.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {ROLE}")
        if kind == "postgres":
            cursor.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {ROLE}")
    connection.close()
    owner = OWNERS[alias] = dict(connection.settings_dict)
    if kind == "mariadb":
        connection.settings_dict.update(USER=ROLE, PASSWORD="")
    else:
        connection.settings_dict["OPTIONS"] = {**owner["OPTIONS"], "assume_role": ROLE}
    try:
        yield
    finally:
        del OWNERS[alias]
        connection.close()
        connection.settings_dict.update(owner)


def parameters_of_owner(alias: str) -> dict[str, Any]:
    """Return the driver's parameters with which the owner of an alias's database connects."""
    connection = connections[alias]
    if alias in OWNERS:
        connection = connection.copy(alias)
        connection.settings_dict = OWNERS[alias]
    return dict(connection.get_connection_params())
