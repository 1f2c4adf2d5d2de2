"""The tutorial does what it says, from its first line to its last, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_docs import FENCE, text_of
from tests.support.databases import ROOT
from tests.support.private_servers import free_port
from tests.support.threads import wait_until

TUTORIAL = ROOT / "docs" / "tutorial.md"
#: What it leaves running.
SERVERS = ("python manage.py runserver", "python -m celery")


class Reader:
    """Somebody who follows the tutorial: writes the files, types the commands, and leaves servers running."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.printed: list[str] = []
        self.servers: list[subprocess.Popen[bytes]] = []
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SQLSEM", "DJANGO"))
        }
        installed = os.environ.get(
            "SQLSEM_TUTORIAL_BIN", ""
        )  # of an environment that has a wheel, instead of the checkout
        path = os.pathsep.join([installed or str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = kept | {"PATH": path, "DJANGO_SUPERUSER_PASSWORD": "tutorial"}
        if not installed:
            self.environment["PYTHONPATH"] = str(ROOT)

    def follow(self, language: str, text: str) -> None:
        if language == "py":
            self.write(text)
        elif language == "console":
            for line in text.splitlines():
                self.type(line.removeprefix("$ "))
        elif language == "sh":
            self.type(text)

    def write(self, text: str) -> None:
        head = text.splitlines()[0].removeprefix("# ")
        name, _, where = head.partition(", ")
        with (self.folder / name).open("a" if where == "at the end" else "w") as file:
            file.write(text)

    def type(self, command: str) -> None:
        if command.startswith("python -m pip install"):
            return  # it is installed
        command = command.replace("8000", str(self.port)).replace("createsuperuser", "createsuperuser --noinput")
        if command.startswith(SERVERS):
            with (self.folder / f"server-{len(self.servers)}.log").open("wb") as log:
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {command}"],
                    cwd=self.folder, env=self.environment, start_new_session=True, stdout=log, stderr=log,
                )  # fmt: skip
            self.servers.append(process)
            if "runserver" in command:
                wait_until(self.answers, what="the site answers")
            return
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        self.printed.append(done.stdout + done.stderr)

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/admin/login/", timeout=5).status == 200)
        return False

    def close(self) -> None:
        for process in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.servers:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    found = Reader(tmp_path)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.process_side
def test_the_tutorial_works_as_written(reader: Reader) -> None:
    for _indent, language, text in FENCE.findall(text_of(TUTORIAL)):
        reader.follow(language, text)
    answers = next(each.split() for each in reader.printed if "503" in each)
    assert sorted(answers) == ["200", "200", "503"]
    assert answers[0] == "503"  # at once
    listed = next(each for each in reader.printed if "1 of 2 slots held" in each)
    assert re.search(r"^reports  1/2 +held .* pid \d+ MainThread +sleep ", listed, re.MULTILINE)
    wait_until(lambda: (reader.folder / "sent.txt").exists(), timeout=60, what="the task has run")
    assert (reader.folder / "sent.txt").read_text() == "ben@example.com\n"
    assert "Ran 1 test" in reader.printed[-1]
    look_at_the_dashboard(reader)


def look_at_the_dashboard(reader: Reader) -> None:
    wait_until(reader.answers, what="the site answers again")  # the server starts anew when a file has changed
    base = f"http://127.0.0.1:{reader.port}/admin/"
    with httpx.Client(base_url=base, follow_redirects=True, timeout=30) as client:
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', client.get("login/").text)
        assert token
        form = {"username": "ann", "password": "tutorial", "csrfmiddlewaretoken": token[1], "next": "/admin/"}
        index = client.post("login/", data=form)
        assert index.status_code == 200
        assert "Locks" in index.text
        overview = client.get("sqlsem/semaphorerow/")
        assert "reports" in overview.text
