"""How Sphinx makes the site: `make docs` builds it in site/; it opens from disk and asks no other machine for anything.

The sources are the files of the whole project as they lie on disk: links between them hold here and in any checkout.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.optional import KEYHOLE_VERSION
from keyhole.recovery import typeset

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
HOME = "docs/index"
RESULTS = "benchmarks/results/"
CONTENTS = re.compile(r"^## On this page\n\n(?:- .*\n)+\n", re.MULTILINE)  # the site has its own beside the page
MATHJAX = Path(next(iter(find_spec("sphinx-mathjax-offline").submodule_search_locations)), "static/mathjax/tex-svg.js")
# What the theme calls them, and what reports do.
COLOURS = {
    "foreground-primary": "ink",
    "foreground-secondary": "soft",
    "foreground-muted": "soft",
    "background-primary": "card",
    "background-secondary": "page",
    "background-hover": "plain-soft",
    "background-border": "line",
    "brand-primary": "plain",
    "brand-content": "plain",
    "brand-visited": "plain",
    "link": "plain",
    "link--visited": "plain",
    "code-background": "page",
    "inline-code-background": "page",
}


def colours(scheme: int) -> dict[str, str]:
    """Colours of the theme, in the palette of reports: 0 is the light one, 1 the dark one."""
    style = (DOCS / "../src/keyhole/report/templates/report.css").read_text(encoding="utf-8")
    palette = {
        name: each[scheme] for name, *each in re.findall(r"--([a-z-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    }
    return {f"color-{use}": palette[name] for use, name in COLOURS.items()}


def sizes() -> dict[str, str]:
    """The type scale of reports."""
    style = (DOCS / "../src/keyhole/report/templates/report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z-]+): ([\d.]+rem);", style))


project = "Keyhole"
author = "The Keyhole developers"
version = release = KEYHOLE_VERSION
root_doc = HOME
include_patterns = ["*.md", "docs/**", "examples/*.md", f"{RESULTS}*.md"]
exclude_patterns = [".*", "src", "tests", "site", "build", "dist", "runs", "demo-run", "test-artifacts"]
highlight_language = "text"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

default_role = "py:obj"  # `name` in a docstring is a link where it is a name, else code
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
add_module_names = False

# One file, with its glyphs in it: nothing is fetched, from disk neither.
mathjax_path = MATHJAX.name

html_theme = "furo"
html_theme_options = {
    "light_css_variables": colours(0) | sizes(),
    "dark_css_variables": colours(1),
    "navigation_with_keys": True,
}
html_title = "Keyhole"
html_favicon = html_logo = "../src/keyhole/live/static/icon.svg"
html_static_path = ["assets/site.css", "assets/site.js", str(MATHJAX)]
html_extra_path = ["assets/index.html"]  # leads to the home page, which lies in docs/ as its source does
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it is fetched, which browsers refuse from disk
html_permalinks_icon = "#"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def source_read(app: Sphinx, name: str, source: list[str]) -> None:
    """Give a page what it has in the site only: the navigation, or a title."""
    text = CONTENTS.sub("", source[0])
    if name == HOME:
        app.env.note_dependency(str(DOCS / "navigation.txt"))
        text += "\n" + (DOCS / "navigation.txt").read_text(encoding="utf-8")
    elif name.startswith(RESULTS):
        title = name.removeprefix(RESULTS).replace("_", " ").capitalize()
        text = f"# {title}\n\n" + typeset(text.replace("\n### ", "\n## "))
    source[0] = text


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", source_read)
