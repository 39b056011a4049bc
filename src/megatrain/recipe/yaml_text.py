"""YAML to a located tree. Duplicate keys, tags and loops are mistakes; every mistake has a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from megatrain.errors import RecipeError
from megatrain.recipe.problems import Problem
from megatrain.recipe.scalars import is_text, scalar, shown
from megatrain.recipe.tree import Mark, Node, dotted

_MAX_NODES = 10_000  # aliases multiply: nine lines of them can stand for a billion nodes
_MAX_DEPTH = 50
_MAX_CHARACTERS = 1 << 20
_CORE_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}


def parse(text: str, *, source: str, environment: Mapping[str, str], lines: bool = True) -> tuple[Node, list[Problem]]:
    """The tree of one document and the mistakes found on the way.

    `lines=False` for a value from the command line, where a line number says nothing.
    Raises RecipeError where the text is not YAML at all, or no person wrote it.
    """
    if len(text) > _MAX_CHARACTERS:
        raise RecipeError(f"{len(text):,} characters are too many for a recipe", where=source)
    try:
        document = yaml.compose(text, Loader=_Loader)
    except _TooLarge as error:
        where = f"{source}:{error.line}" if lines else source
        raise RecipeError("too large or nested too deeply for a recipe", where=where) from None
    except yaml.MarkedYAMLError as error:
        raise _unreadable(error, text=text, source=source, lines=lines) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        character = f"U+{error.character:04X}" if isinstance(error.character, int) else repr(error.character)
        raise RecipeError(f"the character {character} cannot stand in YAML", where=f"{source}:{line}") from error
    except RecursionError as error:
        raise RecipeError("nested too deeply", where=source) from error
    builder = _Builder(source=source, environment=environment, lines=lines)
    if document is None:
        return Node(None, Mark(source)), []
    return builder.build(document, path=()), builder.problems


def _unreadable(error: yaml.MarkedYAMLError, *, text: str, source: str, lines: bool) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None and lines else source
    what = (error.problem or error.context or "cannot be parsed").replace("\n", " ")
    hint = None
    if "cannot start any token" in what and "'\\t'" in what:
        hint = "indent with spaces; YAML does not allow tabs"
    elif "mapping values are not allowed" in what:
        hint = "a value that contains `: ` must be quoted"
    elif mark is not None and "${" in "".join(text.split("\n")[mark.line : mark.line + 1]):
        hint = "inside { } and [ ] a ${VARIABLE} must be quoted"
    return RecipeError(f"not valid YAML: {what}", where=where, hint=hint)


class _TooLarge(Exception):
    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Loader(yaml.BaseLoader):
    """Stops at a number of nodes that no recipe has: composing a million of them takes minutes."""

    nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        self.depth += 1
        if self.nodes > 2 * _MAX_NODES or self.depth > 4 * _MAX_DEPTH:  # keys count here, and are not limited below
            raise _TooLarge(self.line + 1)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@dataclass
class _Builder:
    source: str
    environment: Mapping[str, str]
    lines: bool
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def mark(self, node: yaml.Node) -> Mark:
        return Mark(self.source, node.start_mark.line + 1 if self.lines else None)

    def note(self, node: yaml.Node, *, path: tuple[str | int, ...], text: str) -> None:
        self.problems.append(Problem(self.mark(node), dotted(path), text))

    def build(self, node: yaml.Node, *, path: tuple[str | int, ...]) -> Node:
        self.nodes += 1
        if self.nodes > _MAX_NODES or len(path) > _MAX_DEPTH:
            raise RecipeError("too large or nested too deeply for a recipe", where=str(self.mark(node)))
        if node.tag not in _CORE_TAGS:
            self.note(node, path=path, text=f"tags are not supported: {shown(node.tag)}")
            return Node(None, self.mark(node))
        if isinstance(node, yaml.MappingNode):
            return Node(self.mapping(node, path=path), self.mark(node))
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(child, path=(*path, index)) for index, child in enumerate(node.value)]
            return Node(items, self.mark(node))
        assert isinstance(node, yaml.ScalarNode)
        try:
            value = scalar(node.value, quoted=node.style is not None, environment=self.environment)
        except ValueError as error:
            self.note(node, path=path, text=str(error))
            value = None
        return Node(value, self.mark(node))

    def mapping(self, node: yaml.MappingNode, *, path: tuple[str | int, ...]) -> dict[str, Node]:
        children: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.note(key_node, path=path, text="a key must be a name, not a list or a mapping")
                continue
            key = key_node.value.replace("$${", "${")  # keys are not expanded, but written like values
            if not is_text(key):
                self.note(key_node, path=path, text="a key holds half a surrogate pair, which is no character")
                continue
            if key == "<<" and key_node.style is None:
                inherited.update(self.merged(value_node, path=path))
                continue
            if key in children:
                where = f", first in line {children[key].mark.line}" if self.lines else ""
                self.note(key_node, path=(*path, key), text=f"the key stands twice{where}")
                continue
            child = self.build(value_node, path=(*path, key))
            children[key] = Node(child.value, self.mark(key_node))
        return {**inherited, **children}

    def merged(self, node: yaml.Node, *, path: tuple[str | int, ...]) -> dict[str, Node]:
        """YAML's ``<<: *anchor`` (of one mapping or a list of them, the first one winning)."""
        built = self.build(node, path=(*path, "<<"))  # one deeper: a mapping may merge itself
        sources = built.value if isinstance(built.value, list) else [built]
        found: dict[str, Node] = {}
        for source in reversed(sources):
            if isinstance(source.value, dict):
                found.update(source.value)
            else:
                self.note(node, path=path, text="`<<` takes a mapping or a list of mappings")
        return found
