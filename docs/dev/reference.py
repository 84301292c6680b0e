"""Generates the command-line and API references and further pages of the site, as a hook of mkdocs.

Nothing that it makes is committed. It reads sources and `--help`, so that TensorFlow is not needed.
"""

import ast
import dataclasses
import posixpath
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # pages of the site that lie elsewhere in the checkout
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "examples.md": "examples/README.md",
    "from_horovod_keras.md": "examples/from_horovod_keras.md",
    "tests.md": "tests/README.md",
}
_HERE = {source: page for page, source in PAGES.items()}
_WRAPPED = "<style>.md-typeset pre > code { white-space: pre-wrap; }</style>\n"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config):
    """Takes the addresses of the repository and of the site from pyproject.toml, if it has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    addresses = project.get("urls", {})
    config.repo_url = addresses.get("Repository", config.repo_url)
    config.site_url = addresses.get("Documentation", config.site_url)
    return config


def on_files(files, config):
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(
            File.generated(config, page, content=linked((ROOT / source).read_text(), source, page))
        )
    files.append(File.generated(config, "generated/commands.md", content=commands()))
    files.append(File.generated(config, "generated/api.md", content=api()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Adapts the links of a page of docs/ that lead out of it."""
    source = page.file.src_uri
    return (
        markdown
        if source in PAGES or source.startswith("generated/")
        else linked(markdown, f"docs/{source}", source)
    )


def linked(text, source, page):
    """Returns Markdown whose links work on the site.

    Links to files that are not pages become plain text.

    Args:
      text: Markdown.
      source: its path in the checkout, from which its links lead.
      page: its path on the site.
    """

    def link(match):
        image, words, target, anchor = match.groups()
        if "://" in target:  # the site asks no other server for images
            return f"`{words}`" if image else match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in _HERE:
            path = f"docs/{_HERE[path]}"
        if not path.startswith("docs/"):
            return f"`{words.strip('`')}`" if not words.startswith("![") else words
        target = posixpath.relpath(path[5:], posixpath.dirname(page) or ".")
        return f"{image}[{words}]({target}{anchor or ''})"

    return _LINK.sub(link, text)


def commands():
    """Returns the reference of all commands, from their `--help`."""
    sys.path.insert(0, str(ROOT))
    from hybrid_imagenet.__main__ import COMMANDS

    parts = ["# Command line\n\nGenerated from `hybrid-imagenet COMMAND --help`.\n", _WRAPPED]
    for name, (_, line) in COMMANDS.items():
        words = [name, "--help=all" if name == "train" else "--help"]
        shown = subprocess.run(
            [sys.executable, "-m", "hybrid_imagenet", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        parts.append(
            f"## {name}\n\n{line[0].upper()}{line[1:]}.\n\n```text\n{shown.stdout.strip()}\n```\n"
        )
    return "\n".join(parts)


def api():
    """Returns the reference of the public names of `hybrid_imagenet`, from signatures and
    docstrings.
    """
    sys.path.insert(0, str(ROOT))
    import hybrid_imagenet
    from hybrid_imagenet.optimizers.registry import OPTIMIZERS

    groups = {
        "hi": [
            f"hybrid_imagenet.{home}:{name}"
            for name, home in sorted(hybrid_imagenet._HOMES.items())
        ],
        "hi.schedules": list(exported("schedules/__init__.py")),
        "hi.callbacks": list(exported("callbacks/__init__.py")),
        "hi.data": ["hybrid_imagenet.data:shard", "hybrid_imagenet.data:digits"],
        "hi.order": [f"hybrid_imagenet.order:{name}" for name in hybrid_imagenet.order.__all__],
    }
    parts = [
        "# API\n\nGenerated from docstrings. [The library](../library.md) is the guide.\n",
        _WRAPPED,
    ]
    for group, names in groups.items():
        parts.append(f"## {group}\n")
        parts += [entry(group, *name.split(":")) for name in names]
    parts.append("## hi.optimizers\n")
    parts += [optimizer(method) for method in OPTIMIZERS.values()]
    return "\n".join(parts)


def optimizer(method):
    """Returns the heading, arguments and docstring of an optimizer, whose arguments are its
    options.
    """
    module, name = method.constructor.split(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    text = next(ast.get_docstring(node) for node in tree.body if getattr(node, "name", "") == name)
    from hybrid_imagenet.options import options_of

    helps = {known.name: known.help for known in options_of(method.options).values()}
    rows = [
        f"{f.name}={f.default!r}".ljust(32) + helps.get(f.name, "")
        for f in dataclasses.fields(method.options)
    ]
    return "\n".join(
        [f"### hi.optimizers.{name}\n\n```text", text, "", *(row.rstrip() for row in rows), "```\n"]
    )


def exported(file):
    """Yields module:name of each import of a module that only exports."""
    for node in ast.walk(ast.parse((ROOT / "hybrid_imagenet" / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def entry(group, module, name):
    """Returns the heading, signature and docstrings of a function or class, read from its
    source.
    """
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    nodes = {node.name: node for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
    node = nodes[name]
    init = next(
        (n for n in getattr(node, "body", []) if getattr(n, "name", "") == "__init__"), None
    )
    function = node if isinstance(node, ast.FunctionDef) else init
    arguments = (
        ast.unparse(function.args).removeprefix("self").removeprefix(", ") if function else ""
    )
    texts = [ast.get_docstring(node), ast.get_docstring(init) if init else ""]
    return f"### {group}.{name}\n\n```python\n{group}.{name}({arguments})\n```\n\n" + "".join(
        f"```text\n{text}\n```\n\n" for text in texts if text
    )
