"""What the admin shows of locks: drawings, the page of one lock, and how pages refresh themselves."""

from __future__ import annotations
