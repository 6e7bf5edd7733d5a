"""How Sphinx builds this site: `make docs`."""

from sphinx.application import Sphinx

from atoll._version import __version__

project = "Atoll"
author = "the Atoll authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
# The API of atoll.tensorflow and atoll.tunix is shown without gigabytes of other packages.
autodoc_mock_imports = ["keras", "tensorflow", "tunix"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True

html_theme = "furo"
html_title = f"Atoll {release}"
html_copy_source = False
html_show_sphinx = False


def _link_within_the_site(_: Sphinx, __: str, source: list[str]) -> None:
    """Replace links to files that pages of the site include. In the repository, the links lead to the files."""
    for file, page in (("CONTRIBUTING.md", "contribute/contributing.md"), ("CHANGELOG.md", "project/changelog.md")):
        source[0] = source[0].replace(f"](../../{file}", f"](/{page}")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _link_within_the_site)
