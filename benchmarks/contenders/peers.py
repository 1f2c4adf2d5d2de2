"""The peers, each as its documentation says, at the settings that are best for it in these scenarios."""

from __future__ import annotations

import importlib
import time
from typing import Any

from django.db import OperationalError

from benchmarks.contenders.base import Contender, database_entry
from tests.support.servers import install_mysql_driver, url_of


class DbMutex(Contender):
    """django-db-mutex does not wait: whoever finds it taken has to ask again."""

    package, modules, mutex_only = "django-db-mutex", ("db_mutex",), True
    poll = 0.01  # seconds
    note = "polled at 10 ms, as it does not wait by itself; after a deadlock, too; its lease is 30 min"

    def setup(self) -> None:
        from django.db import connections

        connections["default"] = connections[self.alias]  # it knows no other
        self.mutex = importlib.import_module("db_mutex.db_mutex").db_mutex(self.name)
        self.busy = importlib.import_module("db_mutex.exceptions").DBMutexError

    def acquire(self) -> None:
        while True:
            try:
                self.mutex.start()
            except (self.busy, OperationalError):
                time.sleep(self.poll)
            else:
                return

    def release(self) -> None:
        while True:
            try:
                return self.mutex.stop()
            except OperationalError:
                time.sleep(self.poll)

    def teardown(self) -> None:
        from django.db import connections

        connections["default"].close()


class DbMutexPostgres(DbMutex):
    key, database = "django-db-mutex (PostgreSQL)", "postgres"


class DbMutexMariadb(DbMutex):
    key, database = "django-db-mutex (MariaDB)", "mariadb"


class Pglock(Contender):
    """django-pglock without a timeout: with one it sends three statements more."""

    key, package, database = "django-pglock", "django-pglock", "postgres"
    modules, mutex_only = ("pglock", "psycopg"), True
    note = "without a timeout"

    def setup(self) -> None:
        self.lock = importlib.import_module("pglock").advisory(self.name, using=self.alias)

    def acquire(self) -> None:
        self.lock.acquire()

    def release(self) -> None:
        self.lock.release()

    def teardown(self) -> None:
        from django.db import connections

        connections[self.alias].close()


class Dlock(Contender):
    """sqlalchemy-dlock without a timeout: with one it polls once a second on PostgreSQL."""

    package, modules, mutex_only = "sqlalchemy-dlock", ("sqlalchemy_dlock",), True
    note = "without a timeout, in autocommit"
    driver = ""
    timeout: float | None = None

    def setup(self) -> None:
        from sqlalchemy import create_engine
        from sqlalchemy.engine import URL

        entry = database_entry(self.alias)
        url = URL.create(
            self.driver,
            username=entry["USER"] or None,
            password=entry["PASSWORD"] or None,
            host=entry["HOST"] or None,
            port=int(entry["PORT"]) if entry["PORT"] else None,
            database=entry["NAME"],
        )
        self.engine = create_engine(url, isolation_level="AUTOCOMMIT")
        self.connection = self.engine.connect()
        self.lock = importlib.import_module("sqlalchemy_dlock").create_sadlock(self.connection, self.name)

    def acquire(self) -> None:
        self.lock.acquire(timeout=self.timeout)

    def release(self) -> None:
        self.lock.release()

    def teardown(self) -> None:
        self.connection.close()
        self.engine.dispose()


class DlockPostgres(Dlock):
    key, database, driver = "sqlalchemy-dlock (PostgreSQL)", "postgres", "postgresql+psycopg"


class DlockMariadb(Dlock):
    key, database = "sqlalchemy-dlock (MariaDB)", "mariadb"
    timeout = 3600
    note = "with a timeout of an hour, in autocommit: without one MariaDB refuses what it sends"

    def setup(self) -> None:
        name = install_mysql_driver()
        self.driver = "mysql+mysqldb" if name.startswith("mysqlclient") else "mysql+pymysql"
        super().setup()


class RedisPeer(Contender):
    """What both peers on Redis have in common: a client of their own per thread, and a lease of 30 s."""

    database, mutex_only = "redis", True
    lease = 30
    client: Any
    lock: Any

    def setup(self) -> None:
        import redis

        self.client = redis.Redis.from_url(url_of(self.database), socket_timeout=None)  # as long as it takes

    def acquire(self) -> None:
        if not self.lock.acquire():
            raise RuntimeError(f"{self.key} gave up on {self.name!r}")

    def release(self) -> None:
        self.lock.release()

    def teardown(self) -> None:
        self.client.close()


class PythonRedisLock(RedisPeer):
    """python-redis-lock, whose waiters are woken; without renewals, which would start a thread per acquire."""

    key, package, modules = "python-redis-lock", "python-redis-lock", ("redis", "redis_lock")
    note = "a lease of 30 s, not renewed; nothing is flushed to a disk"

    def setup(self) -> None:
        super().setup()
        self.lock = importlib.import_module("redis_lock").Lock(self.client, self.name, expire=self.lease)


class RedisPy(RedisPeer):
    """The lock of redis-py, which sleeps between its looks: 100 ms unless told otherwise."""

    key, package, modules = "redis-py Lock", "redis-py", ("redis",)
    note = "polled at 1 ms instead of its 100 ms; a lease of 30 s, not renewed; nothing is flushed to a disk"

    def setup(self) -> None:
        super().setup()
        self.lock = self.client.lock(self.name, timeout=self.lease, sleep=0.001)


CONTENDERS = [DbMutexPostgres, Pglock, DlockPostgres, DbMutexMariadb, DlockMariadb, PythonRedisLock, RedisPy]
