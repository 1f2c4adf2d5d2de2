"""What the client alone can do on Redis."""

from __future__ import annotations

import time

from benchmarks.contenders.base import Contender
from tests.support.servers import url_of

POLL = 0.001  # seconds


class SetNx(Contender):
    """``SET NX PX`` with a lease of 30 s, looked at again after 1 ms, and ``DEL``."""

    key, database, kind, modules = "floor: SET NX (Redis)", "redis", "lock", ("redis",)
    mutex_only = True
    note = "polled at 1 ms; nothing is flushed to a disk"

    def setup(self) -> None:
        import redis

        self.client = redis.Redis.from_url(url_of(self.database))

    def acquire(self) -> None:
        while not self.client.set(self.name, "1", nx=True, px=30_000):
            time.sleep(POLL)

    def release(self) -> None:
        self.client.delete(self.name)

    def teardown(self) -> None:
        self.client.close()


CONTENDERS = [SetNx]
