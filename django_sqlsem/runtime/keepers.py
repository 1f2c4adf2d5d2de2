"""The keepers of this process, one per backend, made at the first acquire."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from django.db import connections

from django_sqlsem.core import forks, greenlets
from django_sqlsem.runtime.keeper import Keeper

if TYPE_CHECKING:
    from django_sqlsem.backends.base import BaseSemaphoreBackend
    from django_sqlsem.runtime.acquisition import Acquisition


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
                keeper = Keeper(backend)
                _keepers[id(backend)] = keeper
    return keeper


def all_keepers() -> list[Keeper]:
    """Return the keepers that this process has."""
    return list(_keepers.values())


def all_acquisitions() -> list[Acquisition]:
    """Return every acquisition that this process knows of."""
    return [acquisition for keeper in all_keepers() for acquisition in list(keeper.acquisitions.values())]


def stop_all() -> None:
    """Give everything back, end the threads and close the connections. What comes later starts anew."""
    for keeper in list(_keepers.values()):
        try:
            keeper.stop()
        except Exception:
            logger.exception("The keeper of %r met an error as it ended; the others end all the same.", keeper.alias)


def _begin_anew() -> None:
    global _keepers_lock
    _keepers_lock = threading.Lock()
    for keeper in _keepers.values():
        keeper.after_fork()
    _parents.extend(_keepers.values())  # so that nothing of them is finalised
    _keepers.clear()


forks.register("keepers", "nobody would renew or give back: threads do not survive a fork", in_child=_begin_anew)
