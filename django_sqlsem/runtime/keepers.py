"""The keepers of this process, one per backend, made at the first acquire."""

from __future__ import annotations

import logging
import threading
from typing import Any

from django.core.signals import setting_changed
from django.db import connections, router
from django.dispatch import receiver

from django_sqlsem.backends import database_for, get_backend, get_counting_backend
from django_sqlsem.backends.base import BaseSemaphoreBackend
from django_sqlsem.conf import config
from django_sqlsem.core import forks, greenlets, testmode
from django_sqlsem.runtime.acquisition import Acquisition
from django_sqlsem.runtime.keeper import Keeper

logger = logging.getLogger("django_sqlsem")

_keepers: dict[int, Keeper] = {}
_keepers_lock = threading.Lock()
_parents: list[Keeper] = []


def keeper_for(backend: BaseSemaphoreBackend) -> Keeper:
    """Return this process's keeper of a backend's database."""
    keeper = _keepers.get(id(backend))
    if keeper is None or keeper.backend is not backend:
        with _keepers_lock:
            keeper = _keepers.get(id(backend))
            if keeper is None or keeper.backend is not backend:
                if not backend.process_local:
                    greenlets.refuse(connections[backend.alias])
                keeper = Keeper(backend, all_keepers)
                _keepers[id(backend)] = keeper
    return keeper


#: By ``using``, and whether for counters: the keepers that outside of tests stay those of their database.
_lasting: dict[tuple[str | None, bool], Keeper] = {}


def keeper_at(using: str | None, *, counter: bool = False) -> Keeper:
    """Return this process's keeper of the locks, or of the counters, of ``using``: see ``backends.database_for()``.

    Raises what Django does if the running test may not use that database.
    """
    forks.notice()
    testing = testmode.active()
    if not testing and (found := _lasting.get((using, counter))) is not None:
        return found
    alias = database_for(using)
    backend = get_counting_backend(alias) if counter else get_backend(alias)
    if not backend.process_local:
        testmode.refuse_forbidden(connections[alias])
    keeper = keeper_for(backend)
    if not testing and (using is not None or config().database is not None or not router.routers):
        _lasting[using, counter] = keeper
    return keeper


@receiver(setting_changed, dispatch_uid="sqlsem_keepers")
def _forget_settings(**kwargs: Any) -> None:
    _lasting.clear()


def all_keepers() -> list[Keeper]:
    """Return the keepers that this process has."""
    return list(_keepers.values())


def all_acquisitions() -> list[Acquisition]:
    """Return every acquisition that this process knows of."""
    return [acquisition for keeper in all_keepers() for acquisition in list(keeper.acquisitions.values())]


def stop_all(*, told: bool = True) -> None:
    """Give everything back, end the threads and close the connections. What comes later starts anew.

    ``told``: whether those who wait are told so, by an error.
    """
    for keeper in list(_keepers.values()):
        try:
            keeper.stop(told=told)
        except Exception:
            logger.exception("The keeper of %r met an error as it ended; the others end all the same.", keeper.alias)


def _begin_anew() -> None:
    global _keepers_lock
    _keepers_lock = threading.Lock()
    for keeper in _keepers.values():
        keeper.after_fork()
    _parents.extend(_keepers.values())  # so that nothing of them is finalised
    _keepers.clear()
    _lasting.clear()


forks.register("keepers", "nobody would renew or give back: threads do not survive a fork", in_child=_begin_anew)
