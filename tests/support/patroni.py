"""A primary of PostgreSQL and a synchronous standby that Patroni keeps, with an etcd of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support import programs
from tests.support.private_servers import (
    ALIAS,
    PrivateServer,
    children_of,
    environment_in,
    free_port,
    known,
    migrate,
    new_directory,
    settings_of_hosts,
    user_of,
)

#: For how many seconds a leader that says nothing stays the leader: the shortest that Patroni takes.
TTL = 20
#: How long to wait for what the cluster does by itself, in seconds.
_PATIENCE = 120.0
_RULES = ["local all all trust", "host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"]


class Member:
    """One Patroni, and the server that it runs."""

    def __init__(self, number: int, directory: Path, etcd: int) -> None:
        self.name = f"member{number}"
        self.directory = directory
        #: Of the server; nothing but its port and its queries are used.
        self.server = PrivateServer("postgres", directory, {})
        self.api = free_port()
        self.log = directory / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._file = directory / f"{self.name}.yml"
        self._file.write_text(yaml.safe_dump(self._settings(etcd)))

    def start(self) -> None:
        """Start Patroni, which starts the server in time."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [programs.find("patroni"), str(self._file)],
                cwd=self.directory,
                env=environment_in(self.directory),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **user_of("postgres"),
            )

    def state(self) -> dict[str, Any]:
        """Return what Patroni says of the member; nothing while it says nothing."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self.ask("GET", "/patroni", timeout=1.0)))
        return {}

    def ask(self, method: str, path: str, body: str = "", timeout: float = 60.0) -> bytes:
        """Ask Patroni's interface."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.api, timeout=timeout)) as connection:
            connection.request(method, path, body)
            return connection.getresponse().read()

    def pids(self) -> list[int]:
        """Return the processes of the member: Patroni's, and the server's, which outlives it."""
        found = [self.process.pid, *children_of(self.process.pid)] if self.process is not None else []
        with contextlib.suppress(OSError, ValueError, IndexError):
            server = int((self.directory / self.name / "postmaster.pid").read_text().split()[0])
            found += [server, *children_of(server)]
        return found

    def kill(self) -> None:
        """End all of it by SIGKILL, as when its host is lost."""
        for sent in (signal.SIGSTOP, signal.SIGKILL):  # first none is to start others
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
        if self.process is not None:
            self.process.wait(10)
            self.process = None

    def _settings(self, etcd: int) -> dict[str, Any]:
        address = f"127.0.0.1:{self.server.port}"
        dynamic = {
            "ttl": TTL,
            "loop_wait": 1,
            "retry_timeout": 3,
            "synchronous_mode": True,
            "postgresql": {"parameters": {"fsync": "off", "shared_buffers": "16MB"}},
        }
        return {
            "scope": "sqlsem",
            "name": self.name,
            "restapi": {"listen": f"127.0.0.1:{self.api}", "connect_address": f"127.0.0.1:{self.api}"},
            "etcd3": {"host": f"127.0.0.1:{etcd}"},
            "bootstrap": {"dcs": dynamic, "initdb": [{"auth": "trust"}, {"encoding": "UTF8"}, "no-sync"]},
            "postgresql": {
                "listen": address,
                "connect_address": address,
                "data_dir": str(self.directory / self.name),
                "bin_dir": str(Path(programs.find("initdb")).parent),
                "pgpass": str(self.directory / f"{self.name}.pgpass"),
                "authentication": {
                    part: {"username": "postgres", "password": "unused"} for part in ("superuser", "replication")
                },
                "parameters": {"unix_socket_directories": str(self.directory)},
                "pg_hba": _RULES,
                "remove_data_directory_on_diverged_timelines": True,
            },
        }


class Cluster:
    """Two members."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._etcd: subprocess.Popen[bytes] | None = None
        self._etcd_port = free_port()
        self.members = [Member(number, directory, self._etcd_port) for number in range(2)]

    def start(self) -> None:
        """Start it, with the tables in it."""
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
        data = self.directory / "etcd"
        command = [programs.find("etcd"), "--data-dir", data, "--unsafe-no-fsync", "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        environment, user = environment_in(self.directory), user_of("postgres")
        with (self.directory / "etcd.log").open("wb") as log:
            self._etcd = subprocess.Popen(
                command, cwd=self.directory, env=environment, stdout=log, stderr=log, start_new_session=True, **user
            )
        self.members[0].start()
        self.wait(lambda: self.primary() is not None)
        self.members[1].start()
        self.wait(self.is_whole)
        primary = self.primary()
        assert primary is not None
        primary.server.query(f"CREATE DATABASE {self.settings['NAME']}", database="")
        migrate(self.settings)

    def close(self) -> None:
        """End it, and remove its data."""
        for member in self.members:
            member.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait(10)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Its entry of ``DATABASES``."""
        return settings_of_hosts([member.server for member in self.members])

    def primary(self) -> Member | None:
        """Return the member that Patroni says is the leader."""
        for member in self.members:
            state = member.state()
            if state.get("state") == "running" and state.get("role") in ("primary", "master"):
                return member
        return None

    def is_whole(self) -> bool:
        """Whether there is a primary with a synchronous standby."""
        states = [member.state() for member in self.members]
        return any(state.get("sync_standby") for state in states) and self.primary() is not None

    def switch_over(self) -> None:
        """Have the standby take the primary's part in an orderly way."""
        before = self.primary()
        assert before is not None
        before.ask("POST", "/switchover", json.dumps({"leader": before.name}))
        self.wait(lambda: self.primary() not in (None, before))

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + _PATIENCE
        while not until():
            logs = self.directory.glob("*.log")
            assert time.monotonic() < deadline, "\n".join(each.read_text()[-3000:] for each in logs)
            time.sleep(0.2)


@contextlib.contextmanager
def patroni_cluster() -> Iterator[Cluster]:
    """Run a cluster with the tables in it, known to Django as ``ALIAS``."""
    cluster = Cluster(new_directory("postgres"))
    try:
        cluster.start()
        with known(ALIAS, cluster.settings):
            yield cluster
    finally:
        cluster.close()
