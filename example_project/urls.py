from __future__ import annotations

from django.contrib import admin
from django.urls import path

from example_project.demo.views import index
from example_project.reports import views

urlpatterns = [
    path("", index, name="index"),
    path("reports/monthly/", views.monthly_report, name="monthly"),
    path("reports/yearly/", views.yearly_report, name="yearly"),
    path("admin/", admin.site.urls),
]
