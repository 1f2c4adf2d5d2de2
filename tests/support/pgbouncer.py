"""PgBouncer in front of a covered PostgreSQL database: ``with pgbouncer("postgres") as pooler``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.db import connections

from tests.support import programs
from tests.support.databases import child_environment
from tests.support.private_servers import free_port

_PATIENCE = 10.0


class PgBouncer:
    """A pooler on ``port`` of this host, in front of the database of ``alias``."""

    def __init__(self, alias: str, directory: Path, settings: dict[str, str]) -> None:
        self.alias = alias
        self.directory = directory
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = settings

    @property
    def settings(self) -> dict[str, Any]:
        """The alias's entry of ``DATABASES``, through the pooler. Nothing is prepared, as it asks for."""
        current = dict(connections[self.alias].settings_dict)
        options = {"prepare_threshold": None} | (current.get("OPTIONS") or {})
        return current | {"HOST": "127.0.0.1", "PORT": str(self.port), "OPTIONS": options}

    def env(self) -> dict[str, str]:
        """Return the environment for a child process that reaches the alias through the pooler."""
        databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
        databases[self.alias] |= {"HOST": "127.0.0.1", "PORT": str(self.port), "OPTIONS": self.settings["OPTIONS"]}
        return {"SQLSEM_TEST_DATABASES": json.dumps(databases)}

    def start(self) -> None:
        """Start it, and wait until queries come through."""
        server = connections[self.alias].get_connection_params()
        target = {
            "host": server.get("host") or "127.0.0.1",
            "port": str(server.get("port") or 5432),
            "user": server["user"],
            "password": server.get("password", ""),
        }
        fixed = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",  # whoever comes is the user of the line above
            "pool_mode": "transaction",
            "default_pool_size": "5",
            "min_pool_size": "0",
            "ignore_startup_parameters": "extra_float_digits,options",
            "logfile": str(self.directory / "log"),
            "pidfile": str(self.directory / "pid"),
        }
        lines = ["[databases]", "* = " + " ".join(f"{key}={_quoted(value)}" for key, value in target.items() if value)]
        lines += ["[pgbouncer]", *(f"{key} = {value}" for key, value in (fixed | self._settings).items())]
        file = self.directory / "pgbouncer.ini"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        user = programs.other_user("postgres")
        if user:
            for path in (self.directory, file):
                os.chown(path, user["user"], user["group"])
        with (self.directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [programs.find("pgbouncer"), str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **user,
            )
        deadline = time.monotonic() + _PATIENCE
        while not self.answers():
            assert self.process.poll() is None, f"pgbouncer has ended:\n{self.log}"
            assert time.monotonic() < deadline, f"pgbouncer does not answer:\n{self.log}"
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether a query comes through."""
        try:
            with self.connect() as connection:
                connection.execute("SELECT 1")
        except Exception:
            return False
        return True

    def connect(self) -> Any:
        """Open a plain connection through it, in autocommit. The caller closes it."""
        import psycopg

        parameters = connections[self.alias].get_connection_params()
        parameters.pop("cursor_factory", None)
        parameters |= {"host": "127.0.0.1", "port": self.port, "prepare_threshold": None, "connect_timeout": 5}
        return psycopg.connect(**parameters, autocommit=True)

    @property
    def log(self) -> str:
        """What it has logged."""
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "log").read_text(encoding="utf-8", errors="replace")
        return (self.directory / "output").read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """End it and its connections, at once."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait(10)

    def close(self) -> None:
        """End it, and remove its files."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def pgbouncer(alias: str, **settings: str) -> Iterator[PgBouncer]:
    """Run PgBouncer in front of the database of an alias, by default in transaction mode. Skips without the program.

    ``settings`` are its own: ``pool_mode="session"``, ``default_pool_size="1"``.
    """
    programs.need("pgbouncer")
    pooler = PgBouncer(alias, Path(tempfile.mkdtemp(prefix="sqlsem-pgbouncer-")), settings)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.close()


def _quoted(value: str) -> str:
    doubled = value.replace("'", "''")
    return f"'{doubled}'"
