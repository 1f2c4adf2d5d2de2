"""A worker that is cut off from its broker while its busy tasks are to be sent again, and reaches it again later."""

from __future__ import annotations

import pytest
from django.conf import settings
from kombu.utils.url import parse_url

from django_sqlsem import AcquireTimeoutError, semaphore
from django_sqlsem.testing import held
from tests.places.celery_workers import Broker, Worker, alias, name, of, path
from tests.support.proxy import Proxy
from tests.support.threads import wait_until

__all__ = ["alias", "name", "path"]  # fixtures

pytestmark = pytest.mark.soak

#: A worker that gives up to send, and tries to connect again, within seconds.
CONF = {
    "broker_connection_timeout": 2,
    "broker_connection_max_retries": None,
    "broker_connection_retry": True,
    "task_publish_retry": False,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("task", ["ranked", "ranked_late"])
def test_the_broker_is_lost_when_a_busy_task_is_to_be_sent_again(task, pool, alias, name, path):
    """The task waits for four seconds; meanwhile the broker goes away."""
    with Broker("rabbitmq") as broker:
        where = parse_url(settings.FOUND["rabbitmq"].where)
        with Proxy(where["hostname"] or "127.0.0.1", where["port"] or 5672) as proxy:
            url = f"amqp://{where['userid']}:{where['password']}@127.0.0.1:{proxy.port}/{where['virtual_host']}"
            with Worker(broker, pool=pool, concurrency=2, conf={**CONF, "broker_url": url}) as worker:
                worker.ready()
                with held(name, total=1) as [permit]:
                    result = broker.send(task, path, name, "cut")
                    wait_until(lambda: semaphore(name).status().waiting == 1, timeout=60, what="it waits")
                    proxy.refuse()
                    wait_until(lambda: "could not be sent again" in worker.log, timeout=120, what="it was not sent")
                    proxy.resume()
                    if task == "ranked":
                        with pytest.raises(AcquireTimeoutError):
                            result.get(timeout=120)
                    permit.release()
                if task == "ranked_late":
                    assert result.get(timeout=120) == "cut"
                assert broker.send("work", path, name, "next").get(timeout=120) == "next"
                said = [line for line in worker.log.splitlines() if "could not be sent again" in line]
                worker.stop()
    outcome = "fails" if task == "ranked" else "is given back to the broker"
    assert all("ERROR" in line and f"and {outcome}:" in line for line in said)
    assert [line["word"] for line in of(path, "begin")] == (["next"] if task == "ranked" else ["cut", "next"])
