"""The demo's load: threads that send real requests, and one that sends real tasks."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from example_project.demo.children import HOST
from example_project.reports.tasks import rebuild_figures, send_report

if TYPE_CHECKING:
    from collections.abc import Callable

PATHS = ("/reports/monthly/", "/reports/yearly/")
TASKS = (send_report.si("ann@example.com"), rebuild_figures.si())


def get(port: int, path: str, *, timeout: float = 30) -> int:
    """Return the status of one request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


class Load:
    """Visitors and tasks, until ``stop()``. ``calm()`` leaves a little of it, with longer work to look at."""

    def __init__(self, port: int, *, visitors: int, pending: Callable[[int], int], most_pending: int) -> None:
        self.results: Counter[str] = Counter()
        self.error = ""
        self.calm = False
        self._port = port
        self._pending = pending
        self._most_pending = most_pending
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._visit, name=f"visitor-{n}") for n in range(visitors)]
        self._threads.append(threading.Thread(target=self._send_tasks, name="task-sender"))

    def start(self) -> None:
        """Let the visitors in."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send nothing more, and wait for the answers that are still due."""
        self._stopped.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _visit(self) -> None:
        while not self._stopped.is_set():
            path = random.choice(PATHS) + (f"?seconds={random.uniform(1, 4):.1f}" if self.calm else "")
            try:
                status = get(self._port, path)
            except (OSError, http.client.HTTPException) as error:
                self._note("failed", f"{path}: {type(error).__name__}: {error}")
            else:
                outcome = {200: "served", 503: "busy"}.get(status, "failed")
                self._note(outcome, f"{path} answered {status}")
            self._stopped.wait(random.expovariate(1 / self._pause()))

    def _pause(self) -> float:
        """Return the seconds between two visits: the crowd comes and goes, so that everybody gets a turn."""
        if self.calm:
            return 20.0
        return 0.1 if time.monotonic() % 4 < 3 else 1.0

    def _send_tasks(self) -> None:
        sent = 0
        while not self._stopped.wait(2 if self.calm else 0.05):
            if self._pending(sent) < self._most_pending:
                random.choice(TASKS).delay()
                sent += 1

    def _note(self, outcome: str, detail: str) -> None:
        with self._lock:
            self.results[outcome] += 1
            if outcome == "failed" and not self.error:
                self.error = detail
