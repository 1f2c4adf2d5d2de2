from __future__ import annotations

from django.db import models


class Meter(models.Model):
    """One row that counts how many are in at once: plain SQL, so that it can bear witness to the locks."""

    inside = models.IntegerField(default=0)
    peak = models.IntegerField(default=0)
    finished = models.IntegerField(default=0)
    retried = models.IntegerField(default=0)
    failed = models.IntegerField(default=0)
    lost = models.IntegerField(default=0)

    class Meta:
        db_table = "demo_meter"

    def __str__(self) -> str:
        return f"{self.inside} in, at most {self.peak}"
