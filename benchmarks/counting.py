"""A TCP proxy in front of a database server that counts what passes: statements, round trips and bytes."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.servers import PORTS
from tests.support.proxy import Proxy


@dataclass
class Stream:
    """What a client has said on one connection, as far as it has not been read yet."""

    said: bytearray = field(default_factory=bytearray)
    #: Whether the last bytes came from the client: what it adds before an answer belongs to the same round trip.
    asking: bool = False
    #: Whether the messages of PostgreSQL have begun, which follow one packet without a type.
    begun: bool = False
    #: Whether its statements can be counted: not if they are encrypted.
    legible: bool = True


def postgres_statements(stream: Stream) -> int:
    """Take whole messages of PostgreSQL's protocol from a stream; return how many of them run a statement."""
    count, said = 0, stream.said
    while len(said) >= 8 if not stream.begun else len(said) >= 5:
        length = struct.unpack_from("!i", said, int(stream.begun))[0] + int(stream.begun)
        if said[0] not in (b"BCDEFHPQSXcdfp" if stream.begun else b"\0"):
            stream.legible = False
        if not stream.legible or len(said) < length:
            break
        if stream.begun:
            count += said[0] in b"QE"  # a simple query, or one execution of a prepared statement
        else:
            stream.begun = struct.unpack_from("!i", said, 4)[0] >> 16 == 3  # else it asks for encryption first
        del said[:length]
    return count


def mysql_statements(stream: Stream) -> int:
    """Do the same for the protocol of MariaDB and MySQL."""
    count, said = 0, stream.said
    while len(said) >= 5:
        length = 4 + int.from_bytes(said[:3], "little")
        if said[3] == 1 and length == 36:  # this short a packet in answer to the greeting asks for encryption
            stream.legible = False
        if not stream.legible or len(said) < length:
            break
        count += said[3] == 0 and said[4] in (3, 23)  # COM_QUERY, COM_STMT_EXECUTE
        del said[:length]
    return count


def tds_statements(stream: Stream) -> int:
    """Do the same for the protocol of SQL Server: batches and calls of procedures."""
    count, said = 0, stream.said
    while len(said) >= 8:
        length = int.from_bytes(said[2:4], "big")
        if said[0] not in (1, 2, 3, 6, 7, 14, 16, 17, 18) or length < 8:
            stream.legible = False
        if not stream.legible or len(said) < length:
            break
        count += said[0] in (1, 3) and said[1] & 1
        del said[:length]
    return count


class Counting(Proxy):
    """Counts what all connections through it have sent and received together."""

    protocols: ClassVar[dict[str, Any]] = {
        "postgres": postgres_statements,
        "mariadb": mysql_statements,
        "mssql": tds_statements,
    }

    def __init__(self, database: str, entry: dict[str, Any]) -> None:
        """Stand in front of the server that an entry of ``DATABASES`` names."""
        self._statements_in = self.protocols[database]
        self._streams: dict[socket.socket, Stream] = {}
        self._counting = threading.Lock()
        self.statements = self.trips = self.bytes = 0
        self.legible = True
        super().__init__(entry.get("HOST") or "127.0.0.1", int(entry.get("PORT") or PORTS[database]))

    def counts(self) -> dict[str, float | None]:
        """Return what has passed so far."""
        with self._counting:
            statements = self.statements if self.legible else None
            return {"statements": statements, "trips": self.trips, "bytes": self.bytes}

    def passing(self, client: socket.socket, data: bytes, *, asked: bool) -> None:
        """Count what a client asked, or was answered."""
        with self._counting:
            stream = self._streams.setdefault(client, Stream())
            self.bytes += len(data)
            self.trips += asked and not stream.asking
            stream.asking = asked
            if asked and stream.legible:
                stream.said += data
                self.statements += self._statements_in(stream)
                self.legible = self.legible and stream.legible
