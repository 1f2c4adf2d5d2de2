from django.db import migrations, models

from django_sqlsem.models.fields import ExactCharField


class Migration(migrations.Migration):
    dependencies = [('sqlsem', '0001_initial')]

    operations = [
        migrations.AddField(
            model_name='semaphorerow',
            name='paused_us',
            field=models.BigIntegerField(null=True, verbose_name='paused since'),
        ),
        migrations.AddField(
            model_name='semaphorerow',
            name='paused_until_us',
            field=models.BigIntegerField(null=True, verbose_name='paused until'),
        ),
        migrations.AddField(
            model_name='semaphorerow',
            name='paused_by',
            field=ExactCharField(blank=True, db_default='', default='', max_length=150, verbose_name='paused by'),
        ),
        migrations.AddField(
            model_name='semaphorerow',
            name='paused_reason',
            field=ExactCharField(
                blank=True, db_default='', default='', max_length=200, verbose_name='reason of the pause'
            ),
        ),
    ]
