# ruff: noqa: RUF012 (lists, as makemigrations writes them)
from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Meter",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("inside", models.IntegerField(default=0)),
                ("peak", models.IntegerField(default=0)),
                ("finished", models.IntegerField(default=0)),
                ("retried", models.IntegerField(default=0)),
                ("failed", models.IntegerField(default=0)),
                ("lost", models.IntegerField(default=0)),
            ],
            options={"db_table": "demo_meter"},
        ),
    ]
