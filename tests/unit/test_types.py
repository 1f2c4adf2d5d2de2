"""What type checkers make of the decorators and of what they return."""

from __future__ import annotations

import re
import textwrap

import pytest

pytestmark = pytest.mark.process_side

PROGRAM = """
    from collections.abc import Iterator
    from django_sqlsem import Permit, current_permit, mutex, semaphore
    from django_sqlsem.locks import rlock
    from django_sqlsem.refresh import refresh_every

    def plain(count: int) -> str:
        return ""

    async def waits(count: int) -> str:
        return ""

    def items(count: int) -> Iterator[str]:
        yield ""

    reveal_type(semaphore("a", 3)(plain))
    reveal_type(semaphore("a", 3, on_busy="skip", timeout=0)(plain))
    reveal_type(mutex("a", on_busy="skip")(waits))
    reveal_type(mutex("a", on_busy="raise", lease=5)(waits))
    reveal_type(current_permit())
    reveal_type(rlock("a", using="locks").acquire().depth)
    reveal_type(refresh_every("a", 60, lambda: 5)())
    reveal_type(refresh_every("a", 60)(plain)(1))

    semaphore("a", 3, on_busy="wait")
    mutex("a", slots=3)
    mutex("a", timout=3)
    semaphore("a", release="later")
"""


def test_type_checkers_know_what_a_decorated_call_returns(tmp_path):
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    out, _, _ = api.run(["--config-file=", "--strict", "--no-incremental", f"--cache-dir={tmp_path}", str(program)])
    mine = [line for line in out.splitlines() if line.startswith(str(program))]
    assert [re.search(r'type is "(.*)"', line)[1] for line in mine if "type is" in line] == [
        "def (count: int) -> str",
        "def (count: int) -> str | None",
        "def (count: int) -> typing.Coroutine[Any, Any, str | None]",
        "def (count: int) -> typing.Coroutine[Any, Any, str]",
        "django_sqlsem.locks.permit.Permit | None",
        "int",
        "int",
        "str",
    ]
    refused = {line.split(":")[1] for line in mine if "error:" in line}
    assert refused == {
        str(number)
        for number, line in enumerate(textwrap.dedent(PROGRAM).splitlines(), 1)
        if line.strip().startswith(("semaphore(", "mutex("))
    }
