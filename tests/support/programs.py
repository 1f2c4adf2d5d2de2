"""Where the programs are that tests start by themselves: servers of their own and a pooler."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

#: The programs by name: where they may be beside the PATH. Those of a package are looked for together.
PLACES = {
    "initdb": ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin"),
    "mariadbd": ("/usr/sbin", "/usr/libexec"),
    "pgbouncer": ("/usr/sbin",),
    "patroni": (),
    "etcd": (),
}
_VERSION = re.compile(r"\d+(?:\.\d+)+")


def find(name: str) -> str:
    """Return the path of one of these programs. ``FileNotFoundError`` if it is not installed."""
    if found := shutil.which(name):
        return os.path.realpath(found)
    for place in PLACES[name]:
        root = Path("/")
        # The newest first.
        for directory in sorted(root.glob(place.lstrip("/")), key=lambda each: _numbers(str(each)), reverse=True):
            if os.access(directory / name, os.X_OK):
                return str(directory / name)
    raise FileNotFoundError(f"{name} is not installed")


def describe(path: str) -> str:
    """Return a program's name and version in one line."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    version = _VERSION.search(said)
    return f"{os.path.basename(path)} {version.group() if version else ''}".strip()


def need(name: str) -> str:
    """Return the path of one of these programs. Skips the test without it."""
    import pytest  # not in child processes, which come here through the settings
    from django.conf import settings

    if name in settings.FOUND:
        return str(settings.FOUND[name].where)
    if name in settings.MISSING:
        pytest.skip(f"no {name}: {settings.MISSING[name].reason}")
    try:
        return find(name)
    except FileNotFoundError as error:
        pytest.skip(f"no {name}: {error}")


def other_user(*names: str) -> dict[str, Any]:
    """Return what starts a process as the first of these users that is there, if we are root; servers refuse root."""
    if os.geteuid() != 0:
        return {}
    known = {each.pw_name: each for each in pwd.getpwall()}
    user = next(known[name] for name in (*names, "nobody") if name in known)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]
