"""The hooks of the process: forks, exits, and test databases that must be dropped."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

from django.db.backends.signals import connection_created

from django_sqlsem import backends, entries, holds, identity, keeper_thread, scopes, sessions, testmode

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_installed = False


def install() -> None:
    """Install the hooks, once per process."""
    global _installed
    if _installed:
        return
    _installed = True
    testmode.install()
    connection_created.connect(_guard_test_database, dispatch_uid="sqlsem_lifecycle")
    atexit.register(stop_all)
    _stop_with_multiprocessing()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=sessions.before_fork,
            after_in_parent=sessions.after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )


def stop_all() -> None:
    """Give back everything that this process holds and close the library's connections; later use starts anew."""
    keeper_thread.stop_all()


def _after_fork_in_child() -> None:
    holds.after_fork()
    sessions.after_fork_in_child()
    backends.after_fork()
    keeper_thread.after_fork()
    scopes.after_fork()
    entries.after_fork()
    identity.after_fork()
    _stop_with_multiprocessing()


def _stop_with_multiprocessing() -> None:
    # A child of multiprocessing ends by os._exit(): atexit is not run there, its own finalisers are.
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, stop_all, exitpriority=10)


def _guard_test_database(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Leave a test database before it is dropped: nobody may be connected to it then."""
    creation: Any = connection.creation
    if not testmode.active() or hasattr(creation, "_sqlsem_guarded"):
        return
    destroy = creation.destroy_test_db

    def leave_and_destroy(*args: Any, **kwargs: Any) -> Any:
        stop_all()
        return destroy(*args, **kwargs)

    creation._sqlsem_guarded = True
    creation.destroy_test_db = leave_and_destroy
