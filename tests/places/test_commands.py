"""Management commands, and the documentation's line for cron, in the little environment that cron gives."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest
from django.core.management import CommandError, call_command

from django_sqlsem import mutex, semaphore
from tests.places.queue_work import recipe
from tests.support.databases import ROOT, child_environment


def test_the_documentations_command(database, settings, capsys, caplog):
    settings.SQLSEM = {"DATABASE": database}
    scope = {"__name__": "nightly"}
    exec(recipe("BaseCommand"), scope)
    call_command(scope["Command"]())
    with mutex("nightly").acquire() as permit, caplog.at_level(logging.INFO):
        permit.detach()  # as somebody else's
        with pytest.raises(CommandError, match="nightly is at work already") as ended:
            call_command(scope["Command"]())
        skips = mutex("nightly", timeout=0, on_busy="skip")(scope["Command"].handle.__wrapped__)
        call_command(type("Command", (scope["Command"],), {"handle": skips})())
    assert ended.value.returncode == 75
    assert capsys.readouterr().out == "working\n"
    assert [record.what for record in caplog.records if record.name == "django_sqlsem"] == ["busy"]
    call_command(scope["Command"]())
    assert capsys.readouterr().out == "working\n"


@pytest.mark.parametrize("busy", [False, True])
def test_the_documentations_line_for_cron(committed, busy):
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    [line] = re.findall(r"```text\n[\d* ]+ (cd .*)\n```", text)
    line = line.replace("/srv/shop", str(ROOT)).replace(".venv/bin/python", sys.executable)
    environment = {name: value for name, value in child_environment().items() if re.match("SQLSEM|DJANGO|PYTHON", name)}
    environment |= {"HOME": "/", "PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    holding = semaphore("cleanup").acquire() if busy else None
    done = subprocess.run(["/bin/sh", "-c", line], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (75 if busy else 0), done.stderr
    assert bool(done.stderr) == busy
    if holding is not None:
        assert "pid" in done.stderr
        holding.release()
