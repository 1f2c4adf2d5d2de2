"""How a value that was refused is shown in the message that refuses it."""

from __future__ import annotations

from typing import Final

MAX_SHOWN: Final = 100


def shown(value: object) -> str:
    """Return ``repr(value)``, cut to some 100 characters; whatever the value is, this works."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an int of many digits has no repr, and a stranger's may fail
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{bits}>"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
