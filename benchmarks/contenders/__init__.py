"""Who is compared: one small class each."""

from __future__ import annotations

import importlib.util

from benchmarks.contenders.base import Contender


def all_contenders() -> dict[str, type[Contender]]:
    """Return every contender by its key, whether its packages and its server are there or not."""
    from benchmarks.contenders import (
        floors_mariadb,
        floors_mssql,
        floors_postgres,
        floors_redis,
        floors_sqlite,
        ours,
        peers,
    )

    modules = (ours, floors_postgres, floors_mariadb, floors_mssql, floors_sqlite, peers, floors_redis)
    return {kind.key: kind for module in modules for kind in module.CONTENDERS}


def peer_names() -> list[str]:
    """Return the names of the packages that ``--peers`` can choose."""
    return sorted({kind.package for kind in all_contenders().values() if kind.package})


def missing_module(kind: type[Contender]) -> str | None:
    """Return the name of the first module that this contender needs and that is not installed."""
    return next((name for name in kind.modules if importlib.util.find_spec(name) is None), None)
