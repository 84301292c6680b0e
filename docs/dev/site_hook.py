"""Prepares the pages of the site, as a hook of mkdocs.

The site also shows pages that are outside docs/, such as README.md. Their links, and links from
docs/ to files outside it, are changed so that they work on the site. Pictures of such a file are
copied to the site. Nothing here imports the package.
"""

import posixpath
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# By page of the site: its file in the checkout, outside docs/.
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "examples.md": "examples/README.md",
    "from_horovod_keras.md": "examples/from_horovod_keras.md",
    "tests.md": "tests/README.md",
}
# By picture of the site: its file in the checkout, outside docs/.
PICTURES = {
    "studies/figure-3-1.png": "studies/records/figure-3-1.png",
    "studies/optimizers-by-batch.png": "studies/records/optimizers-by-batch.png",
}
_SITE_PATH_BY_SOURCE = {source: path for path, source in {**PAGES, **PICTURES}.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config):
    """Takes the addresses of the repository and of the site from pyproject.toml, if it has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    addresses = project.get("urls", {})
    config.repo_url = addresses.get("Repository", config.repo_url)
    config.site_url = addresses.get("Documentation", config.site_url)
    return config


def on_files(files, config):
    """Adds the pages and pictures that are outside docs/."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        content = linked(text, source, page, config.repo_url)
        files.append(File.generated(config, page, content=content))
    for picture, source in PICTURES.items():
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Changes the links of a page in docs/ that lead out of it."""
    source = page.file.src_uri
    if source in PAGES:
        return markdown
    return linked(markdown, f"docs/{source}", source, config.repo_url)


def linked(text, source, page, repository):
    """Returns Markdown whose links work on the site.

    Links to files that are not on the site lead to the repository. While it has no address, they
    become plain text.

    Args:
      text: Markdown.
      source: Its path in the checkout, from which its links lead.
      page: Its path on the site.
      repository: Address of the repository; None or empty if it has none.
    """

    def link(match):
        image, words, target, anchor = match.groups()
        if "://" in target:
            # The site requests no images from other servers.
            return f"`{words}`" if image else match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in _SITE_PATH_BY_SOURCE:
            path = f"docs/{_SITE_PATH_BY_SOURCE[path]}"
        if not path.startswith("docs/"):
            if words.startswith("!["):
                return words
            if repository and not image:
                return f"[{words}]({repository.rstrip('/')}/blob/HEAD/{path}{anchor or ''})"
            names_the_file = posixpath.basename(path) in words
            return f"`{words.strip('`')}`" if names_the_file else words
        target = posixpath.relpath(path[5:], posixpath.dirname(page) or ".")
        return f"{image}[{words}]({target}{anchor or ''})"

    return _LINK.sub(link, text)
