"""SQLite: the file, what it lies on, and how the project's own connections use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from django_sqlsem.backends.lock_files import POSSIBLE, SUFFIX
from django_sqlsem.doctor.findings import Finding, error, note, ok, warning
from django_sqlsem.doctor.patients import Patient

#: File systems of other hosts: what locks of files and shared memory mean there is anybody's guess.
NETWORK: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "lustre"}
    | {"ncpfs", "nfs", "nfs4", "ocfs2", "smb2", "smb3", "smbfs", "virtiofs"}
)
#: Seconds that the project's own statements should wait for the one writer.
PATIENT: Final = 5.0


def examine(patient: Patient) -> Iterator[Finding]:
    """Look at the file of an SQLite database."""
    path = str(patient.value("SELECT file FROM pragma_database_list WHERE name = 'main'", ""))
    if not path:
        text = "The database is in memory: its locks are this process's own, and keep no other process out."
        yield error("sqlsem.D008", text, "Keep the locks in a file, or on a server.")
        return
    yield from _where(patient, path)
    journal = str(patient.value("PRAGMA journal_mode", "")).lower()
    if journal == "wal":
        yield ok("sqlsem.D008", "The journal is WAL: readers do not hold up the writer.")
    elif journal in ("off", "memory"):
        text = f"The journal mode is {journal!r}: a crash in the middle of a write destroys the database."
        yield warning("sqlsem.D008", text, 'Set OPTIONS["init_command"] = "PRAGMA journal_mode = WAL".')
    else:
        text = f"The journal mode is {journal!r}: whoever reads holds up every acquire and release."
        yield note("sqlsem.D008", text, 'Set OPTIONS["init_command"] = "PRAGMA journal_mode = WAL".')
    timeout = float(patient.options.get("timeout", PATIENT))
    if timeout < PATIENT:
        text = f"The project's own statements wait {timeout:g} s for the writer, and then fail: 'database is locked'."
        yield warning("sqlsem.D008", text, 'Set OPTIONS["timeout"] to 5 or more.')


def _where(patient: Patient, path: str) -> Iterator[Finding]:
    kind = file_system(path)
    if kind in NETWORK:
        patient.no_beacons.append("the file is on another host")
        text = f"The file is on a network file system ({kind}): two hosts may both get one slot, and destroy the file."
        yield error("sqlsem.D008", text, "Keep the file on a disk of its own host, or the locks on a server.")
    directory = path + SUFFIX
    place = directory if os.path.exists(directory) else os.path.dirname(path)
    if not os.access(path, os.W_OK):
        yield error("sqlsem.D007", f"The file {path!r} cannot be written to.", "Give this user the right to write it.")
    elif not POSSIBLE:
        patient.no_beacons.append("this system has no locks of files")
        text = "This system has no locks of files: a killed process's slots come back with its lease."
        yield note("sqlsem.D008", text, f"Shorten LEASE ({patient.config.lease:g} s) if that is too long.")
    elif not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):
        patient.no_beacons.append("the directory of the beacons cannot be written to")
        text = f"{place!r} cannot be written to, so that a killed process's slots come back with its lease."
        yield warning("sqlsem.D008", text, f"Let this user create {directory!r}, with a file for each process.")


def file_system(path: str, mounts: str = "/proc/self/mounts") -> str:
    """Return the kind of file system that a path is on; empty where the system does not tell."""
    try:
        with open(mounts, encoding="utf-8", errors="replace") as lines:
            found = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for raw, type_ in found:
        place = raw.encode().decode("unicode_escape")  # a blank in a path is \040
        inside = place == "/" or real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, type_
    return kind
