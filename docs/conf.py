"""The site: ``make docs``. The pages are Markdown, so that they can be read in the repository as well."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import django

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
django.setup()  # the reference imports modules that have models

project = "django-sqlsem"
author = "django-sqlsem contributors"
project_copyright = author
release = version = metadata.version("django-sqlsem")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_external_toc"]
external_toc_path = "_toc.yml"
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
suppress_warnings = ["epub.unknown_project_files"]

myst_heading_anchors = 4  # links lead to headings by the names that GitHub gives them
copybutton_prompt_text = "$ "

autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"Name": "str"}

html_theme = "furo"
html_title = "django-sqlsem"
html_show_sphinx = False
html_copy_source = False
