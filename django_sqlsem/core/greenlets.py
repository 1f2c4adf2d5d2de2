"""Greenlets instead of threads: which libraries are supported, and with which databases.

A waiter waits by Python's own locks, and the keeper is a thread: in a patched interpreter both are greenlets. A driver
written in C stops all greenlets of the process while it waits for the server's answer.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured

logger = logging.getLogger("django_sqlsem")

#: What gevent must have patched.
NEEDED: Final = ("threading", "socket", "select", "time")


def library() -> str:
    """Return the library whose greenlets replace this interpreter's threads: ``gevent``, ``eventlet``, or nothing."""
    eventlet: Any = sys.modules.get("eventlet.patcher")  # never imported for its own sake
    if eventlet is not None and (eventlet.is_monkey_patched("thread") or eventlet.is_monkey_patched("socket")):
        return "eventlet"
    return "gevent" if any(map(_is_patched, NEEDED)) else ""


def refusal(green: str, vendor: str, alias: str) -> str:
    """Say why locks can't be kept in this database under these greenlets; empty: they can."""
    if green == "eventlet":
        return (
            "Locks can't be taken under eventlet, which the database drivers do not work with: use gevent (celery "
            "--pool=gevent, gunicorn --worker-class=gevent), threads or processes."
        )
    if green == "gevent" and vendor == "microsoft":
        return (
            f"Locks of {alias!r} can't be taken under gevent: on SQL Server a wait is inside the driver, and stops all "
            "greenlets of the process, also those that hold. Use threads or processes there; under gevent locks can "
            "be kept on PostgreSQL, MariaDB, MySQL and SQLite."
        )
    missing = [name for name in NEEDED if not _is_patched(name)]
    if green == library() == "gevent" and missing:
        return (
            f"Locks can't be taken here: gevent has patched only a part of this interpreter, and not "
            f"{', '.join(missing)}. Call gevent.monkey.patch_all() before anything else is imported."
        )
    return ""


def slowness(green: str, connection: Any) -> str:
    """Say why this database's driver is slow under these greenlets; empty: it is not."""
    if green != "gevent":
        return ""
    driver = getattr(connection, "Database", None)
    name = getattr(driver, "__name__", "")
    if connection.vendor == "mysql" and not hasattr(driver, "install_as_MySQLdb"):
        return f"{name} stops all greenlets for each statement: PyMySQL does not."
    if name == "psycopg2" and driver.extensions.get_wait_callback() is None:  # type: ignore[union-attr]
        return "psycopg2 stops all greenlets for each statement: psycopg 3 does not, nor does psycopg2 with psycogreen."
    waiting: Any = sys.modules.get("psycopg.waiting")
    if name == "psycopg" and library() and getattr(waiting, "wait", None) is getattr(waiting, "wait_c", waiting):
        return "psycopg was imported before gevent's patches, and stops all greenlets for each statement."
    return ""


def refuse(connection: Any) -> None:
    """Raise ``ImproperlyConfigured`` if this database can't keep locks in this patched interpreter."""
    green = library()
    if not green:
        return
    if why := refusal(green, connection.vendor, connection.alias):
        raise ImproperlyConfigured(why)
    if slow := slowness(green, connection):
        logger.warning("Locks of %r: %s", connection.alias, slow, extra={"semaphore": "", "what": "greenlets"})


def _is_patched(name: str) -> bool:
    gevent: Any = sys.modules.get("gevent.monkey")
    return gevent is not None and bool(gevent.is_module_patched(name))
