"""Find places in Python text by structure and change nothing else.

The syntax tree says where; the text is cut there, so that comments, blank lines and everything
beside the place stay as they are.
"""

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from dsv4.patches.engine import Outcome, Verdict

T = TypeVar("T")


class Unknown(Exception):
    """A text is none we know; the message names what was looked for and what was found."""


Transform = Callable[[str | None], Outcome]


def fails_closed(transform: Callable[[str | None], Outcome]) -> Transform:
    """Turn `Unknown`, and text that is no Python, into the verdict `drifted`."""

    @functools.wraps(transform)
    def judged(text: str | None) -> Outcome:
        try:
            return transform(text)
        except Unknown as error:
            return Outcome(Verdict.DRIFTED, why=str(error))

    return judged


def superseded(why: str) -> Outcome:
    """Return the outcome of a patch that is not needed."""
    return Outcome(Verdict.SUPERSEDED, why=why)


def is_applied(text: str, name: str, pieces: tuple[str, ...], marks: tuple[str, ...]) -> bool:
    """Tell whether a patch is in a text; raises `Unknown` when a part of it is, or another one.

    `marks` are words that stand in the text only because of this patch, in any version of it.
    """
    counts = [text.count(piece) for piece in pieces]
    if all(count == 1 for count in counts):
        return True
    if any(counts):
        raise Unknown(
            f"holds parts of {name} ({sum(map(bool, counts))} of {len(counts)} pieces, each wanted"
            " once); reinstall its package"
        )
    if found := [mark for mark in marks if mark in text]:
        raise Unknown(
            f"has {found[0]!r} in it, as from another version of {name} or from somebody else's"
            " edit; reinstall its package"
        )
    return False


class Source:
    """One Python text, its syntax tree and the changes to be made."""

    def __init__(self, text: str) -> None:
        try:
            self.tree: Final = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise Unknown(f"is no Python that can be read ({error})") from error
        self.text: Final = text
        self._starts = [0]
        for line in text.split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._changes: list[tuple[int, int, str]] = []

    def offset(self, line: int, column: int) -> int:
        """Return the place in the text; the tree counts columns in bytes."""
        start = self._starts[line - 1]
        whole = self.text[start : self._starts[line] - 1]
        return start + len(whole.encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        if node.end_lineno is None or node.end_col_offset is None:
            raise Unknown(f"line {node.lineno}: has no known end")
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno, node.end_col_offset),
        )

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put `text` in the place of a node."""
        self._changes.append((*self.span(node), text))

    def insert(self, start: int, end: int, text: str) -> None:
        """Put `text` in the place of what stands between two offsets."""
        self._changes.append((start, end, text))

    def before(self, node: ast.stmt, text: str) -> None:
        """Put whole lines before a statement and its decorators."""
        decorators = getattr(node, "decorator_list", [])
        line = min([node.lineno, *(one.lineno for one in decorators)])
        place = self._starts[line - 1]
        self._changes.append((place, place, text))

    def after(self, node: ast.stmt, text: str) -> None:
        """Put whole lines after a statement."""
        place = self._starts[node.end_lineno or node.lineno]
        self._changes.append((place, place, text))

    def need(self, **wanted: str) -> None:
        """Import what is not imported yet: names, each with its module (`Any="typing"`).

        A module named like what is wanted of it is imported itself (`re="re"`).
        """
        imports = [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        there = {alias.asname or alias.name for node in imports for alias in node.names}
        missing: dict[str, list[str]] = {}
        for name, module in wanted.items():
            if name not in there:
                missing.setdefault(module, []).append(name)
        for module, names_of_it in missing.items():
            same = [
                node
                for node in imports
                if isinstance(node, ast.ImportFrom) and node.module == module and not node.level
            ]
            if same and same[0].lineno == same[0].end_lineno:
                known = [ast.unparse(alias) for alias in same[0].names]
                both = ", ".join(sorted({*known, *names_of_it}))
                self.replace(same[0], f"from {module} import {both}")
                continue
            first = [node for node in imports if getattr(node, "module", "") != "__future__"]
            if not first:
                raise Unknown(f"imports nothing, not even {', '.join(names_of_it)}")
            line = f"from {module} import {', '.join(sorted(names_of_it))}\n"
            self.before(first[0], f"import {module}\n" if names_of_it == [module] else line)

    def changed(self) -> str:
        """Return the text with all changes made."""
        text = self.text
        # From the end, so that places stay right. At one place what stands there is replaced
        # before anything is put in front of it, and the first that came stays first.
        order = [(start, end, number) for number, (start, end, _) in enumerate(self._changes)]
        for start, end, number in sorted(order, reverse=True):
            text = text[:start] + self._changes[number][2] + text[end:]
        return text

    def function(self, name: str) -> ast.FunctionDef:
        """Return a function by name, or a method by `Class.method`; it has to be there once."""
        *owner, last = name.split(".")
        scope: list[ast.stmt] = self.tree.body
        for one in owner:
            scope = self.klass(one).body
        found = [node for node in scope if isinstance(node, ast.FunctionDef) and node.name == last]
        return only(found, f"a function {name}")

    def klass(self, name: str) -> ast.ClassDef:
        """Return a class by name; it has to be there once."""
        return only(self.classes(name), f"a class {name}")

    def classes(self, name: str) -> list[ast.ClassDef]:
        """Return the classes of a name at the top level."""
        return [
            node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name
        ]


def only(found: list[T], what: str) -> T:
    """Return the only one of its kind."""
    if len(found) != 1:
        raise Unknown(f"wanted {what} once, found {len(found)}")
    return found[0]


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield the calls of a plain name or of a method of that name."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            called = one.func
            if name == (called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")):
                yield one


def names(node: ast.AST) -> set[str]:
    """Return every name and attribute in a piece of code."""
    plain = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return plain | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names a function takes, in order."""
    arguments = function.args
    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def first_statement(function: ast.FunctionDef) -> ast.stmt:
    """Return the first statement after the docstring."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        return body[1]
    return body[0]


def lines(text: str, indent: int) -> str:
    """Return a text with every line set in."""
    return "".join(" " * indent + line if line.strip() else line for line in text.splitlines(True))
