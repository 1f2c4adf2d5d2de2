"""The interface of a contender: as small as it can be, so that it adds next to nothing to what is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class Contender(ABC):
    """One lock as one thread uses it. ``setup`` and all else are called in that thread."""

    #: Its name in reports and in the JSON.
    key: ClassVar[str]
    #: The server that it uses: postgres, mariadb, mssql, sqlite or redis.
    database: ClassVar[str]
    #: ``ours``, ``rows`` (the floor of semaphores), ``lock`` (the floor of mutexes), ``alternative`` (another way to
    #: use the same locks) or ``peer``.
    kind: ClassVar[str] = "peer"
    #: Which package ``--peers`` chooses it by; empty for others.
    package: ClassVar[str] = ""
    #: Modules that must be installed.
    modules: ClassVar[tuple[str, ...]] = ()
    #: Whether it can have one slot only.
    mutex_only: ClassVar[bool] = False
    #: How it is set up, in a few words, where there was a choice.
    note: ClassVar[str] = ""
    #: How many batches it has sent so far, if it counts them.
    batches: int | None = None

    def __init__(self, name: str, slots: int, alias: str | None = None) -> None:
        self.name = name
        self.slots = slots
        #: The alias in ``DATABASES`` of the database to use.
        self.alias = alias or self.database

    @classmethod  # noqa: B027 - there may be nothing to do
    def prepare(cls, name: str, slots: int, alias: str | None = None) -> None:
        """Make what must be there before any process uses the name. Called once, in the first process."""

    def setup(self) -> None:  # noqa: B027
        """Connect."""

    @abstractmethod
    def acquire(self) -> None:
        """Return as soon as a slot has been taken."""

    @abstractmethod
    def release(self) -> None:
        """Give it back."""

    def teardown(self) -> None:  # noqa: B027
        """Disconnect."""


def database_entry(alias: str) -> dict[str, Any]:
    """Return the settings of a database of this run."""
    from django.conf import settings

    return settings.DATABASES[alias]
