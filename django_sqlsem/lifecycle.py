"""The hooks of the process: forks, exits, and test databases that must be dropped."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import sys
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate

from django_sqlsem import checks, contrib
from django_sqlsem.core import forks, testmode
from django_sqlsem.database import bells, sessions
from django_sqlsem.deadlocks.lent_threads import LentThreads
from django_sqlsem.deadlocks.watch import DeadlockWatch
from django_sqlsem.decorators import answers
from django_sqlsem.history.chore import HistoryChore
from django_sqlsem.runtime import chores, keepers
from django_sqlsem.snapshots import Loss, LossReason

_installed = False


def install() -> None:
    """Install the hooks, once per process."""
    global _installed
    if _installed:
        return
    _installed = True
    testmode.install()
    checks.register()
    contrib.register()
    for chore in (LentThreads, DeadlockWatch, HistoryChore, answers.LogRest):
        chores.plug_in(chore)
    connection_created.connect(_guard_test_database, dispatch_uid="sqlsem_lifecycle")
    connection_created.connect(sessions.remember, dispatch_uid="sqlsem_sqlite_files")
    post_migrate.connect(_lose_flushed, dispatch_uid="sqlsem_lifecycle")
    _import_drivers()
    atexit.register(_at_exit)
    _stop_with_multiprocessing()
    forks.register("exits", "a child that ends by os._exit() would leave its slots to their leases", in_child=_in_child)


def _import_drivers() -> None:
    # At a process's end mssql-python closes all its connections, also under statements of other threads, which crashes
    # it. What registers its end first ends last.
    options = [settings.get("OPTIONS") or {} for settings in connections.settings.values()]
    if any(each.get("python_driver") for each in options):
        with contextlib.suppress(ImportError):  # the first connection says so
            importlib.import_module("mssql_python")


def stop_all(**_: object) -> None:
    """Give back everything that this process holds and close the library's connections; later use starts anew."""
    _stop(told=True)


def _at_exit() -> None:
    # Only daemon threads are left. One that prints a traceback as the interpreter ends may abort it: they wait on.
    _stop(told=False)


def _stop(*, told: bool) -> None:
    keepers.stop_all(told=told)
    answers.log_rest(everything=True)
    bells.stop()


def _in_child() -> None:
    _stop_with_multiprocessing()
    _stop_with_celery()


def _stop_with_multiprocessing() -> None:
    # A child of multiprocessing ends by os._exit(): atexit is not run there, its own finalisers are.
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None:
        return
    if sys.modules["multiprocessing.process"].parent_process() is not None:
        _finalise_with_multiprocessing()
    # A child that is only starting will forget the finalisers it knows by now, and call this afterwards.
    util.register_after_fork(stop_all, _finalise_with_multiprocessing)


def _stop_with_celery() -> None:
    # A child of Celery's prefork pool ends by os._exit() too, and tells only its signal.
    signals: Any = sys.modules.get("celery.signals")
    if signals is not None:
        signals.worker_process_shutdown.connect(stop_all, dispatch_uid="sqlsem_lifecycle")


def _finalise_with_multiprocessing(*_: object) -> None:
    sys.modules["multiprocessing.util"].Finalize(None, stop_all, exitpriority=10)


def _lose_flushed(using: str, **kwargs: Any) -> None:
    """A ``TransactionTestCase`` has emptied the tables: what it left held is lost."""
    # Not with serialized_rollback or available_apps, which keep the signal from being sent: see the guard below.
    if testmode.active() and "plan" not in kwargs:  # a migration has a plan, a flush has none
        for keeper in keepers.all_keepers():
            if keeper.alias == using:
                for acquisition in list(keeper.acquisitions.values()):
                    if acquisition.has_slots:
                        acquisition.lose(Loss(LossReason.SESSION_ENDED, "the test in which it was taken has ended"))
                keeper.backend.emptied()


def _guard_test_database(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Leave a test database before it is dropped, as nobody may be connected to it then; hear of its being emptied."""
    creation, ops, alias = connection.creation, connection.ops, connection.alias
    if testmode.active() and "execute_sql_flush" not in vars(ops):
        flush = ops.execute_sql_flush

        def flush_and_lose(*args: Any, **kwargs: Any) -> Any:
            flushed = flush(*args, **kwargs)
            _lose_flushed(alias)
            return flushed

        vars(ops)["execute_sql_flush"] = flush_and_lose
    if not testmode.active() or hasattr(creation, "_sqlsem_guarded"):
        return
    destroy = creation.destroy_test_db

    def leave_and_destroy(*args: Any, **kwargs: Any) -> Any:
        stop_all()
        return destroy(*args, **kwargs)

    vars(creation).update(_sqlsem_guarded=True, destroy_test_db=leave_and_destroy)
