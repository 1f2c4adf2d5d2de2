from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sqlsem', '0006_transaction_locks'),
    ]

    operations = [
        migrations.CreateModel(
            name='FenceRow',
            fields=[
                ('slot_id', models.BigIntegerField(primary_key=True, serialize=False, verbose_name='slot row')),
            ],
            options={
                'verbose_name': 'fence',
                'verbose_name_plural': 'fences',
                'db_table': 'sqlsem_fence',
                'default_permissions': (),
            },
        ),
        migrations.AddField(
            model_name='slotrow',
            name='fenced',
            field=models.BigIntegerField(null=True, verbose_name='fenced token'),
        ),
    ]
