"""Some hundred busy tasks at once: what their countdowns cost a worker, and how that is bounded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from django_sqlsem.testing import held
from tests.places.celery_workers import Broker, Worker, alias, name, path
from tests.support.threads import wait_until

__all__ = ["alias", "name", "path"]  # fixtures

TASKS = 200
LIMIT = 20


def memory(pid: int) -> int:
    """A process's resident memory, in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def prefetch(worker: Worker) -> int:
    """How many messages a worker takes without acknowledging them."""
    answer = worker.broker.app.control.inspect([worker.name], timeout=10, limit=1).stats()
    return int(answer[worker.name]["prefetch_count"])


@pytest.mark.soak
@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("kind", ["rabbitmq", "redis"])
def test_a_flood_of_busy_tasks(kind, limit, alias, name, path):
    conf = {} if limit is None else {"worker_eta_task_limit": limit}
    with Broker(kind) as broker, Worker(broker, concurrency=2, conf=conf) as worker:
        worker.ready()
        before, most = memory(worker.pid), 0
        with held(name, total=1):
            for nth in range(TASKS):
                broker.send("work", path, name, f"{nth}", ignore_result=True)
            # A task that is sent again goes to the end of the queue, behind those that nobody has looked at yet.
            ends = time.monotonic() + (150 if limit is None else 40)
            while time.monotonic() < ends and (limit is not None or most < TASKS / 2):
                most = max(most, prefetch(worker))
                time.sleep(1)
            grown = memory(worker.pid) - before
            print(f"{kind}, limit {limit}: prefetch count {most}, {grown} KiB more, {grown / TASKS:.1f} a task")
            assert grown < 50_000
            if limit is None:
                assert most > LIMIT * 2  # one for each task that is away
            else:
                assert most <= limit
        assert broker.send("pid").get(timeout=300)  # somebody else's task is served
        broker.app.control.purge()
        worker.process.kill()
        worker.wait()
        wait_until(lambda: worker.process.poll() is not None, what="it has ended")
