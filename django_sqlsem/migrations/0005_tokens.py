from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sqlsem', '0003_lock_sessions'),
    ]

    operations = [
        migrations.AddField(
            model_name='semaphorerow',
            name='tokens',
            field=models.BigIntegerField(null=True, verbose_name='tokens'),
        ),
    ]
