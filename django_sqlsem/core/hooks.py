"""What a lower room calls in a higher one: ``django_sqlsem`` fills it in when it is imported, before all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Returns a function so that each call of it holds a permit of a lock: ``decorate(lock, function)``.
decorate: Callable[[Any, Any], Any]
