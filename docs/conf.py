"""How the documentation is built: ``make docs``. Warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))  # what writes pages from the package is beside this file

import commands  # noqa: E402
import operations_page  # noqa: E402

import surefoot  # noqa: E402

project = "surefoot"
author = "The surefoot developers"
version = release = surefoot.__version__
language = "en"
smartquotes = False  # options of commands begin with two hyphens

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "gallery/**/*.ipynb", "gallery/**/*.py", "gallery/**/*.md5"]
suppress_warnings = ["config.cache"]  # the gallery's order is a class, which is not pickled

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_use_ivar = True

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "surefoot"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

ORDER = [
    "first_certificate.py",
    "vgg_study.py",
    "batchnorm_epsilon.py",
    "training.py",
    "gauss_newton.py",
    "poisson.py",
    "burgers.py",
    "deep_clustering.py",
    "autoencoder.py",
    "implicit_layer.py",
    "own_rule.py",
]


class InOrder:
    """Examples in the order in which one reads them; one that is not listed is an error."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __call__(self, filename: str) -> int:
        """The place of an example."""
        return ORDER.index(filename)


sphinx_gallery_conf: dict[str, Any] = {
    "examples_dirs": [str(DOCS.parent / "examples")],
    "gallery_dirs": ["gallery"],
    "filename_pattern": ".",
    "ignore_pattern": "demo",
    "within_subsection_order": "conf.InOrder",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "min_reported_time": 0,
    "image_scrapers": ("conf.figures",),
}


def figures(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Show what a block of an example assigned to the name ``figure``."""
    from sphinx_gallery.scrapers import figure_rst

    drawn = block_vars["example_globals"].pop("figure", None)
    if drawn is None:
        return ""
    path = next(block_vars["image_path_iterator"])
    drawn.savefig(path, dpi=120)
    return figure_rst([path], gallery_conf["src_dir"], "")


def setup(app: Any) -> None:
    """Write the pages that come from the package before they are read."""
    for name, text in (("operations.rst", operations_page.page()), ("command-line.md", commands.page())):
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
