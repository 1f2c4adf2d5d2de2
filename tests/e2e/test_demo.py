"""``manage.py demo`` as a user runs it: a real process, real requests, real tasks, real databases."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
LAST_LINE = re.compile(r"at most (\d+) of 3 at once, (\d+) served, (\d+) busy, (\d+) retried")
POSTGRES = "postgres://postgres@127.0.0.1:5432/"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the demo needs POSIX process groups")


def environment(folder: Path, url: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in {"DATABASE_URL", "DJANGO_SETTINGS_MODULE"}}
    return {**kept, "EXAMPLE_VAR_DIR": str(folder), **({"DATABASE_URL": url} if url else {})}


@pytest.fixture(autouse=True)
def _one_at_a_time() -> Iterator[None]:
    """Demos of several test processes would look for a free port at the same moment, and find the same one."""
    with open(os.path.join(tempfile.gettempdir(), "sqlsem-tests-of-the-demo"), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def start(folder: Path, *arguments: str, url: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "manage.py", "demo", *arguments],
        cwd=ROOT,
        env=environment(folder, url),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_over(folder: Path) -> list[str]:
    """Return the command lines of processes that were started with this folder and still live."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"EXAMPLE_VAR_DIR={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"{text!r} was never printed:\n{seen}")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    psycopg = pytest.importorskip("psycopg")
    name = f"demo_{uuid.uuid4().hex[:12]}"
    try:
        server = psycopg.connect(POSTGRES + "postgres", autocommit=True, connect_timeout=3)
    except psycopg.OperationalError as error:
        pytest.skip(f"no PostgreSQL: {error}")
    with server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            yield POSTGRES + name
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)])
def test_never_more_than_three_and_nothing_left(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = "" if database == "sqlite" else request.getfixturevalue("postgres")
    for seconds in ("8", "2"):  # the second run finds the tables, the user and the messages of the first
        process = start(tmp_path, "--seconds", seconds, "--workers", "2", url=url)
        output, _none = process.communicate(timeout=120)
        assert process.returncode == 0, output
        match = LAST_LINE.fullmatch(output.splitlines()[-1])
        assert match, output
        peak, served, busy, retried = map(int, match.groups())
        assert peak == 3, output
        assert min(served, busy, retried) > 0 or seconds == "2", output
        assert left_over(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ends_in_order_when_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path)
    seen = read_until(process, " 2 s ")
    assert seen.count("/admin/sqlsem/semaphorerow/") == seen.count("/admin/") == 1
    assert any("example_project.demo.bustle" in each for each in left_over(tmp_path))
    process.send_signal(number)
    output, _none = process.communicate(timeout=60)
    assert process.returncode == 0, seen + output
    assert LAST_LINE.fullmatch(output.splitlines()[-1]), output
    assert left_over(tmp_path) == []


def test_interrupted_while_it_starts(tmp_path: Path) -> None:
    process = start(tmp_path)
    while not (tmp_path / "web.log").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _none = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Nothing was served." in output
    assert left_over(tmp_path) == []


def test_second_demo_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = start(tmp_path, "--workers", "1")
    try:
        read_until(first, " 1 s ")
        second = start(tmp_path, "--seconds", "1")
        output, _none = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"Another demo is running in {tmp_path} (process {first.pid})" in output
        assert "Traceback" not in output
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
    assert left_over(tmp_path) == []


def test_child_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('no server today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start(tmp_path, "--seconds", "1")
    output, _none = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "The web server ended by itself with code 1" in output
    assert "no server today" in output
    assert "Traceback" not in output
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "0"), "--seconds must be more than 0, and finite."),
        (("--workers", "0"), "--workers must be 1 or more."),
        (("--port", "99999"), "--port must be from 1 to 65535."),
    ],
)
def test_wrong_arguments(arguments: tuple[str, str], message: str, tmp_path: Path) -> None:
    process = start(tmp_path, *arguments)
    output, _none = process.communicate(timeout=60)
    assert process.returncode == 1
    assert message in output
    assert "Traceback" not in output
