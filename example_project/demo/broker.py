"""Celery's messages as files in a folder, so that the example needs no server. A toy: use a real broker in earnest.

Kombu's own filesystem transport may read a message of which another process has not written a byte yet; this one
writes it beside the others first, under a name that nobody looks for.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps

TRANSPORT_ALIASES["folder"] = "example_project.demo.broker:Transport"


class Channel(filesystem.Channel):
    """A channel whose messages appear whole, or not at all."""

    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        name = f"{time.monotonic_ns():020}_{uuid.uuid4()}.{queue}.msg"
        hidden = Path(self.data_folder_out, f".{name}")
        hidden.write_text(dumps(payload))
        hidden.rename(hidden.with_name(name))


class Transport(filesystem.Transport):
    """The transport of ``folder://`` addresses."""

    Channel = Channel
