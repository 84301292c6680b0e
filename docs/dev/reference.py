"""Writes the pages of docs/reference from help texts and docstrings.

    python docs/dev/reference.py          # writes the pages and the figure of the schedules
    python docs/dev/reference.py --check  # exits with 1 if a page is not current

The pages are committed, so that they can be read where the code is hosted. They are the same on
every machine: sources are read without importing them, and help texts without a terminal.
TensorFlow is not needed.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "dev")]

REMEDY = "python docs/dev/reference.py"
COLUMNS = "100"
# Longer signatures have one argument per line.
SIGNATURE_COLUMNS = 88
# Examples of commands whose help has none.
EXAMPLES = {
    "demo": "hybrid-imagenet demo",
    "data prepare": "hybrid-imagenet data prepare --from=folder --data_dir=photos --to=shards",
    "data check": "hybrid-imagenet data check --dataset=tfrecord --data_dir=shards",
    "env": "hybrid-imagenet env",
    "plan": "hybrid-imagenet plan --cluster=h100 --hosts=4",
    "report": "hybrid-imagenet report runs/one runs/other --out=comparison",
    "bench": "hybrid-imagenet bench input --source=digits --json=input.json",
}
SUBCOMMANDS = {"data": ("prepare", "check")}
# Figures below the descriptions of public modules.
FIGURES = {"hi.schedules": "![Learning rate by epoch of each schedule](schedules.svg)"}
# Public modules, as attributes of `hi`.
MODULES = ("data", "schedules", "optimizers", "callbacks", "order")
# Classes whose methods users call, with the name of an instance in examples. Methods of other
# classes are called by Keras.
CLASSES_WITH_METHODS = {"ExactBatchSampler": "sampler", "Schedule": "schedule"}
# A flag in a text, and a command that a text does not put into backticks.
_FLAG = r"(?<![\w-])(--[a-z][\w-]*\w(?:=\w+)?|-np\b|-H\b)"
_COMMAND = r"(?<!`)\b(hybrid-imagenet (?:train|run|resume|bench NAME --help)\b)"
SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
    "Example": "Example",
    "Reference": "Reference",
}


def main(words=None):
    """Writes or checks the pages, and returns the exit code.

    Args:
      words: The command line; None for that of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only check that pages are current")
    arguments = parser.parse_args(words)
    if arguments.check:
        outdated = outdated_pages()
        for page in outdated:
            print(f"{page} is not current. Run: {REMEDY}", file=sys.stderr)
        return 1 if outdated else 0
    for page, text in pages().items():
        (ROOT / page).parent.mkdir(exist_ok=True)
        (ROOT / page).write_text(text, encoding="utf-8")
    return 0


def pages():
    """Returns the text of each page and figure, by its path in the checkout."""
    import schedules_figure
    import speed_figure

    return {
        "docs/reference/command-line.md": command_line_page(),
        **api_pages(),
        "docs/reference/schedules.svg": schedules_figure.draw(),
        "docs/gpu-speed.svg": speed_figure.draw(),
    }


def outdated_pages():
    """Returns the paths of committed pages that differ from the generated text."""
    outdated = []
    for page, text in pages().items():
        path = ROOT / page
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated.append(page)
    return outdated


# The command line


@dataclasses.dataclass
class Section:
    """A list of options in a help text.

    Attributes:
      title: Heading of the list.
      options: Pairs of a name with the form of its values, and a description. A name may occur
        several times, as --momentum does, which each optimizer describes in its own words.
    """

    title: str
    options: list[tuple[str, str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Help:
    """The parts of a help text.

    Attributes:
      usage: Its lines that show the form of the command.
      description: Paragraphs before the options.
      sections: Lists of options.
      examples: Lines of commands; descriptions are comments.
      notes: Paragraphs after the options.
    """

    usage: str
    description: list[str] = dataclasses.field(default_factory=list)
    sections: list[Section] = dataclasses.field(default_factory=list)
    examples: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def command_line_page():
    """Returns the page that describes every command."""
    from hybrid_imagenet.__main__ import COMMANDS
    from hybrid_imagenet.options import SPELLING

    parts = [
        "# Command line",
        f"<!-- Generated from help texts. To change this page, edit them and run: {REMEDY} -->",
        "The package installs the program `hybrid-imagenet`. `python -m hybrid_imagenet` is the"
        " same program. It has these commands:",
        table("command", ((f"[`{name}`](#{name})", line) for name, (_, line) in COMMANDS.items())),
        f"Every command prints this description of itself with `--help`. {markdown(SPELLING)}",
    ]
    for name in COMMANDS:
        parts.append(f"## {name}")
        parts += command(name)
        for subcommand in SUBCOMMANDS.get(name, ()):
            parts.append(f"### {name} {subcommand}")
            parts += command(f"{name} {subcommand}")
    return "\n\n".join(parts) + "\n"


def command(name):
    """Returns the description of a command, as Markdown blocks.

    Args:
      name: Words of the command, such as "data check".
    """
    if name == "train":
        # Examples are in the short help, and all flags in the long one.
        parsed = parse_help(help_text("train", "--help=all"))
        parsed.examples = parse_help(help_text("train", "--help")).examples
    else:
        parsed = parse_help(help_text(*name.split(), "--help"))
    if not parsed.examples and name in EXAMPLES:
        parsed.examples = [EXAMPLES[name]]
    description = parsed.description or [f"{capitalize(short_description(name))}."]
    parts = [*map(markdown, description), fence("text", parsed.usage)]
    if parsed.examples:
        parts.append(fence("sh", "\n".join(parsed.examples)))
    for section in parsed.sections:
        title = f"### {section.title}" if name == "train" else f"**{section.title}**"
        options = (f"- `{form}`: {markdown(text)}" for form, text in section.options)
        parts += [title, "\n".join(options)]
    return parts + [markdown(note) for note in parsed.notes]


def short_description(name):
    """Returns the line about a command in the list of commands, or of its subcommands."""
    from hybrid_imagenet.__main__ import COMMANDS

    parent, _, subcommand = name.partition(" ")
    if not subcommand:
        return COMMANDS[name][1]
    arguments, *_ = parse_help(help_text(parent, "--help")).sections
    return dict(arguments.options)[subcommand]


def help_text(*words):
    """Returns the help that a command line prints, on any machine the same.

    Args:
      words: The words after `hybrid-imagenet`.
    """
    from hybrid_imagenet.__main__ import main as run_command

    output = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        # argparse exits after printing help.
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            run_command(words)
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    # This default depends on the machine.
    return re.sub(r"(number of processors),\s+\d+", r"\1", output.getvalue())


def parse_help(text):
    """Splits a help text into its parts."""
    from hybrid_imagenet.options import SPELLING

    usage, *blocks = re.split(r"\n\n+", text.strip())
    parsed = Help(usage)
    for block in blocks:
        lines = block.splitlines()
        if lines[0] in ("Example:", "Examples:"):
            parsed.examples = [example_line(line) for line in lines[1:]]
        elif any(line.startswith("  ") for line in lines):
            parsed.sections.append(parse_section(lines))
        else:
            # The spelling of options is described once for all commands.
            paragraph = " ".join(lines).replace(SPELLING, "").strip()
            target = parsed.notes if parsed.sections else parsed.description
            target += [paragraph] * bool(paragraph)
    parsed.sections = [section for section in parsed.sections if section.options]
    return parsed


def example_line(line):
    """Returns a line of the examples in a help text; descriptions become comments."""
    description = re.fullmatch(r"(.*):", line.strip())
    if description:
        return f"# {description[1]}"
    return re.sub("^ +(?=hybrid-imagenet|watch)", "", line)


def parse_section(lines):
    """Returns a list of options.

    Args:
      lines: A title without indentation, if there is one; names of options, with two or four
        spaces before them; descriptions with six, or two spaces after the name.
    """
    title = " ".join(line for line in lines if not line.startswith(" ")).rstrip(":.")
    section = Section(capitalize(title).replace("Positional arguments", "Arguments"))
    for line in lines:
        if re.match(r" {6}", line):
            form, description = section.options.pop()
            if form.endswith("|"):
                # The values of a flag continue.
                form += line.strip()
            else:
                description = f"{description} {line.strip()}".strip()
            section.options.append((form, description))
        elif line.startswith(" "):
            form, _, description = line.strip().partition("  ")
            section.options.append((form, description.strip()))
    # The option that every command has is described elsewhere. A placeholder for the names of
    # subcommands, which follow it, has no description.
    section.options = [
        (form, description)
        for form, description in section.options
        if description and not form.startswith(("{", "-h, --help"))
    ]
    if not section.title:
        is_option = any(form.startswith("-") for form, _ in section.options)
        section.title = "Options" if is_option else "Names"
    return section


# The library


@dataclasses.dataclass(frozen=True)
class PublicName:
    """A public name and its definition.

    Attributes:
      name: The name as users write it, such as hi.data.shard.
      module: Module that defines it.
      node: The definition in the source.
    """

    name: str
    module: str
    node: ast.AST

    @property
    def docstring(self):
        """The docstring of a function or class, or the text below a constant."""
        if isinstance(self.node, ast.Assign):
            body = parse_module(self.module).body
            text = body[body.index(self.node) + 1]
            return inspect.cleandoc(text.value.value)
        return ast.get_docstring(self.node) or ""

    @property
    def constructor(self):
        """The `__init__` of a class or of its base class, the function itself, or None."""
        if isinstance(self.node, ast.FunctionDef):
            return self.node
        for node in getattr(self.node, "body", []):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return node
        for base in getattr(self.node, "bases", []):
            # Bases of other packages have a dotted name, such as keras.callbacks.Callback.
            if isinstance(base, ast.Name) and base.id not in ("Exception", "Protocol"):
                location = find_definition(self.module, base.id)
                return PublicName(self.name, *location).constructor
        return None


@functools.cache
def parse_module(module):
    """Returns the syntax tree of a module."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def find_definition(module, name):
    """Returns the module that defines a name, and the definition, following imports."""
    imported = None
    for node in ast.walk(parse_module(module)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            imported = node.module
    if imported is None:
        raise LookupError(f"{module} has no {name}")
    return find_definition(imported, name)


def public_names():
    """Returns the public names of `hi` and of its public modules, by module."""
    import hybrid_imagenet
    from hybrid_imagenet.optimizers.registry import OPTIMIZERS

    groups = {"hi": []}
    for name in sorted(hybrid_imagenet._MODULE_BY_NAME):
        home = f"hybrid_imagenet.{hybrid_imagenet._MODULE_BY_NAME[name]}"
        groups["hi"].append(PublicName(f"hi.{name}", *find_definition(home, name)))
    for module in MODULES:
        home = f"hybrid_imagenet.{module}"
        if module == "optimizers":
            locations = [spec.constructor.split(":") for spec in OPTIMIZERS.values()]
            locations.append([f"{home}.average", "WeightAverage"])
        else:
            _, exported = find_definition(home, "__all__")
            locations = [[home, name] for name in ast.literal_eval(exported.value)]
        groups[f"hi.{module}"] = [
            PublicName(f"hi.{module}.{name}", *find_definition(home, name))
            for home, name in locations
        ]
    return groups


def api_pages():
    """Returns a page for `hi` and one for each of its public modules, by path in the checkout."""
    groups = public_names()
    links = {name.name for names in groups.values() for name in names}
    return {
        f"docs/reference/{page_of(group)}": api_page(group, names, links)
        for group, names in groups.items()
    }


def api_page(group, names, links):
    """Returns the page that describes the public names of a module.

    Args:
      group: The module, such as "hi.data".
      names: Its public names.
      links: Names that have a heading on any page.
    """
    parts = [
        "# API" if group == "hi" else f"# {group}",
        f"<!-- Generated from docstrings. To change this page, edit them and run: {REMEDY} -->",
    ]
    if group == "hi":
        parts += introduction(links)
    else:
        parts += docstring_blocks(module_docstring(group), group, links)
    if group in FIGURES:
        parts.append(FIGURES[group])
    rows = []
    for public_name in names:
        summary = public_name.docstring.partition("\n")[0]
        summary = inline(summary, group, linked_names(public_name, group, links))
        rows.append((link_to(public_name.name, group), summary))
    parts.append(table("name", rows))
    for public_name in names:
        parts += entry(public_name, group, links)
    return "\n\n".join(parts) + "\n"


def introduction(links):
    """Returns what the page of `hi` says about its public modules, as Markdown blocks."""
    rows = []
    for module in MODULES:
        group = f"hi.{module}"
        summary = inline(module_docstring(group).partition("\n")[0], group, links)
        rows.append((f"[`{group}`]({page_of(group)})", summary))
    return [
        "These are the public names of `import hybrid_imagenet as hi`. Importing it imports neither"
        " TensorFlow nor Keras nor Horovod; a name is imported when it is used.",
        table("module", rows),
        "## hi",
    ]


def module_docstring(group):
    """Returns the docstring of a public module, such as "hi.data"."""
    return ast.get_docstring(parse_module("hybrid_imagenet" + group.removeprefix("hi")))


def page_of(name):
    """Returns the page in docs/reference that has a public name or module."""
    _, _, rest = name.partition(".")
    module = rest.partition(".")[0]
    return f"api-{module}.md" if module in MODULES else "api.md"


def entry(public_name, group, links):
    """Returns the description of a public name, as Markdown blocks.

    Args:
      public_name: What to describe.
      group: Public module in which unqualified names are looked up for links.
      links: Names that have a heading.
    """
    links = linked_names(public_name, group, links)
    parts = [f"### `{public_name.name}`", fence("python", signature(public_name))]
    parts += docstring_blocks(public_name.docstring, group, links)
    if getattr(public_name.node, "name", "") in CLASSES_WITH_METHODS:
        parts += methods(public_name, group, links)
    return parts


def linked_names(public_name, group, links):
    """Returns the names that are links in the description of a public name.

    A name that is also an argument, such as rank, means the argument.
    """
    arguments = [name for name, _, _ in public_arguments(public_name) if name]
    ambiguous = {f"{module}.{name}" for name in arguments for module in ("hi", group)}
    return links - ambiguous - {public_name.name}


def is_constant(public_name):
    """Returns whether a public name is a constant."""
    return isinstance(public_name.node, ast.Assign)


def methods(public_name, group, links):
    """Returns the descriptions of the public methods and properties of a class."""
    class_name = public_name.node.name
    instance = CLASSES_WITH_METHODS[class_name]
    special = {"__call__": instance, "__len__": f"len({instance})", "__iter__": f"iter({instance})"}
    parts = []
    for node in public_name.node.body:
        text = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
        if not text or (node.name.startswith("_") and node.name not in special):
            continue
        form = special.get(node.name, f"{instance}.{node.name}")
        is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
        if not is_property and "(" not in form:
            returns = ast.unparse(node.returns) if node.returns else ""
            form = format_call(form, arguments_of(node, public_name.module), returns)
        parts += [f"#### `{class_name}.{node.name}`", fence("python", form)]
        parts += docstring_blocks(text, group, links)
    return parts


def signature(public_name):
    """Returns how a function, class or constant is written."""
    node = public_name.node
    if is_constant(public_name):
        value = getattr(importlib.import_module(public_name.module), ast.unparse(node.targets[0]))
        return double_quoted(f"{public_name.name} = {value!r}")
    decorators_and_bases = map(ast.unparse, [*node.decorator_list, *getattr(node, "bases", [])])
    if any(text.startswith(("dataclasses.", "abc.")) for text in decorators_and_bases):
        return format_call(f"class {public_name.name}", fields_of(node)).removesuffix("()")
    returns = getattr(node, "returns", None)
    arguments = [text for _, text, _ in public_arguments(public_name)]
    return format_call(public_name.name, arguments, ast.unparse(returns) if returns else "")


def fields_of(node):
    """Returns the fields of a dataclass with annotations and defaults, [] for other classes."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not any(text.startswith("dataclasses.") for text in decorators):
        return []
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    return [double_quoted(ast.unparse(field)) for field in fields]


def public_arguments(public_name):
    """Returns name, text and default of each argument of a function or class.

    `*` has no name. The default is text, or None if there is none.
    """
    options = options_of_optimizer(public_name.node)
    if options is not None:
        return list(describe_options(options))
    if public_name.constructor is None:
        return []
    return list(describe_arguments(public_name.constructor, public_name.module))


def format_call(name, arguments, returns=""):
    """Returns a call on one line if it is short enough, or else with one argument per line."""
    arrow = f" -> {returns}" if returns and returns != "None" else ""
    line = f"{name}({', '.join(arguments)}){arrow}"
    if len(line) <= SIGNATURE_COLUMNS:
        return line
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{lines}){arrow}"


def arguments_of(function, module):
    """Returns the arguments of a function with annotations and defaults, without `self`."""
    return [text for _, text, _ in describe_arguments(function, module)]


def describe_arguments(function, module):
    """Yields name, text and default of each argument; `*` has neither name nor default."""
    declared = function.args
    positional = [*declared.posonlyargs, *declared.args]
    defaults = [None] * (len(positional) - len(declared.defaults)) + declared.defaults
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg != "self":
            yield describe_argument(argument, default, module)
    if declared.vararg:
        yield describe_argument(declared.vararg, None, module, stars="*")
    elif declared.kwonlyargs:
        yield "", "*", None
    for argument, default in zip(declared.kwonlyargs, declared.kw_defaults, strict=True):
        yield describe_argument(argument, default, module)
    if declared.kwarg:
        yield describe_argument(declared.kwarg, None, module, stars="**")


def describe_argument(argument, default, module, stars=""):
    """Returns name, text and default of an argument; the default is text, or None."""
    text = stars + argument.arg
    if argument.annotation:
        text += f": {double_quoted(ast.unparse(argument.annotation))}"
    if default is None:
        return argument.arg, text, None
    if isinstance(default, ast.Name):
        # Show the value of a constant instead of its name.
        _, definition = find_definition(module, default.id)
        default = getattr(definition, "value", default)
    value = double_quoted(ast.unparse(default))
    return argument.arg, f"{text} = {value}" if argument.annotation else f"{text}={value}", value


def double_quoted(code):
    """Returns code with the quotes that this project uses."""
    return code.replace("'", '"')


def describe_options(options):
    """Yields name, text and default of the arguments of an optimizer, the fields of its options."""
    has_marker = False
    for field in sorted(dataclasses.fields(options), key=lambda field: field.kw_only):
        if field.kw_only and not has_marker:
            has_marker = True
            yield "", "*", None
        value = double_quoted(repr(field.default))
        yield field.name, f"{field.name}: {field.type} = {value}", value


def options_of_optimizer(node):
    """Returns the dataclass of an optimizer's options; None for anything else."""
    from hybrid_imagenet.optimizers.registry import OPTIMIZERS

    for spec in OPTIMIZERS.values():
        if isinstance(node, ast.ClassDef) and spec.constructor.endswith(f":{node.name}"):
            return spec.options
    return None


# Docstrings


def split_docstring(text):
    """Returns the text of a docstring outside its sections, and the sections by title."""
    pattern = rf"^({'|'.join(SECTIONS)}):[ ]*"
    prose, *rest = re.split(pattern, text, flags=re.MULTILINE)
    sections = {}
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        first, _, following = body.partition("\n")
        # A section ends at the first line that is not indented.
        indented, *after = re.split(r"^(?=\S)", following, maxsplit=1, flags=re.MULTILINE)
        sections[title] = "\n".join(filter(None, [first, inspect.cleandoc(f"\n{indented}")]))
        prose += "".join(after)
    return prose.strip(), sections


def documented_arguments(public_name):
    """Returns the descriptions of arguments in the docstring of a public name, by argument."""
    _, sections = split_docstring(public_name.docstring)
    items = documented_items(sections.get("Args", ""))
    return {name.lstrip("*"): description for name, description in items.items() if name}


def documented_default(description):
    """Returns the default that the description of an argument states, or None.

    It is in parentheses, as in "(default: 0.1)" or "(default: None, no clipping)".
    """
    _, found, rest = description.partition("(default: ")
    if not found:
        return None
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:position]
    return None


def documented_items(body):
    """Returns the descriptions in a section such as Args, by name."""
    items = {}
    for part in re.split(r"\n(?=\S)", body.strip()):
        name, _, description = part.partition(":")
        items[name] = " ".join(description.split())
    return items


def docstring_blocks(text, group, links):
    """Returns a docstring as Markdown blocks.

    Args:
      text: The docstring.
      group: Public module in which unqualified names are looked up for links.
      links: Names that have a heading.
    """
    prose, sections = split_docstring(text)
    parts = prose_blocks(prose, group, links)
    for title, body in sections.items():
        heading = SECTIONS[title]
        if title in ("Args", "Attributes", "Raises"):
            items = documented_items(body).items()
            lines = [f"- `{name}`: {inline(d, group, links)}" for name, d in items]
            parts += [f"**{heading}**", "\n".join(lines)]
        elif title == "Example":
            parts += [f"**{heading}**", fence("python", body)]
        else:
            first, *others = prose_blocks(body, group, links)
            parts += [f"**{heading}:** {first}", *others]
    return parts


def prose_blocks(text, group, links):
    """Returns paragraphs, and indented lines as code."""
    blocks = []
    for block in re.split(r"\n\n+", text.strip("\n")):
        if block.startswith("    "):
            blocks.append(fence("text", inspect.cleandoc(f"\n{block}")))
        elif block:
            blocks.append(inline(block, group, links))
    return blocks


# Markdown


def inline(text, group, links):
    """Returns text of a docstring as Markdown, with links to public names and pages.

    Args:
      text: A paragraph.
      group: Public module in which unqualified names are looked up.
      links: Names that have a heading.
    """

    def link(match):
        name = match[1].replace("hybrid_imagenet.", "hi.")
        for candidate in (name, f"{group}.{name}", f"hi.{name}"):
            if candidate in links:
                return link_to(candidate, group, name + match[2])
        return match[0]

    text = re.sub(r"`([\w.]+)((?:\(\))?)`", link, markdown(text))
    return re.sub(r"\bdocs/([\w/-]+\.md)", page_link, text)


def page_link(match):
    """Returns a link to a page, from a page in docs/reference.

    Raises:
      LookupError: If there is no such page.
    """
    if not (ROOT / match[0]).exists():
        raise LookupError(f"A docstring mentions {match[0]}, which does not exist. Correct it.")
    return f"[{match[1]}](../{match[1]})"


def link_to(name, group, words=""):
    """Returns a link to the heading of a public name.

    Args:
      name: The public name.
      group: Module on whose page the link is.
      words: Text of the link; by default the name.
    """
    page = "" if page_of(name) == page_of(group) else page_of(name)
    return f"[`{words or name}`]({page}#{re.sub(r'[^a-z0-9_-]', '', name.lower())})"


def markdown(text):
    """Returns plain text as Markdown: special characters escaped, commands and flags as code.

    Text in backticks stays as it is. Lists begin with a hyphen.
    """
    text = re.sub(r"^\* ", "- ", text, flags=re.MULTILINE)
    text = re.sub(_COMMAND, r"`\1`", text)
    parts = re.split(r"(`[^`]*`)", text)
    for index in range(0, len(parts), 2):
        plain = parts[index].replace("*", r"\*").replace("<", "&lt;")
        parts[index] = re.sub(_FLAG, r"`\1`", plain)
    return "".join(parts)


def capitalize(text):
    """Returns text with a capital first letter."""
    return text[:1].upper() + text[1:]


def fence(language, text):
    """Returns a block of code."""
    return f"```{language}\n{text}\n```"


def table(title, rows):
    """Returns a table of names and descriptions."""
    lines = [f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows]
    return "\n".join([f"| {title} | description |", "|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
