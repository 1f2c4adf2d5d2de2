from __future__ import annotations

from django.db import models


class Probe(models.Model):
    """The outside counter: how many are in at once, the most that ever were, and how many came in all."""

    name = models.CharField(max_length=100, primary_key=True)
    inside = models.IntegerField(default=0)
    peak = models.IntegerField(default=0)
    entered = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.inside} in, {self.peak} at most, {self.entered} in all"
