"""What our code uses of a library that it knows only as `Any`, read from its source: nothing is listed by hand.

A use is a dotted name under the library's module, how it is called if it is, and what number we take it for if we do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CONSTANT = re.compile(r"\b(?:cuda[A-Z]|NVML_)\w+")


@dataclass(frozen=True)
class Use:
    """One use. `positional` None: it is not called here. `value` None: whatever it is worth."""

    path: str
    line: int
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    value: int | None = None

    def __str__(self) -> str:
        return f"{self.path} (line {self.line})"


def attributes(source: Path, stands_for: Mapping[str, str]) -> list[Use]:
    """Every attribute of the objects that `stands_for` names, by the source's own expression for each.

    `{"self._runtime": "", "session": "InferenceSession"}`: what is asked of `self._runtime` is the module's own.
    """
    tree = ast.parse(source.read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    uses = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner, trail = _split(node, stands_for)
        if owner is None:
            continue
        path = ".".join(part for part in (stands_for[owner], *trail) if part)
        call = called.get(id(node))
        uses.append(_use(path, node.lineno, call))
    return uses


def calls_by_name(source: Path, through: tuple[str, ...], prefix: str, before: int = 0) -> list[Use]:
    """Calls like `self._ask("nvmlDeviceGetClockInfo", 1)`, by whichever of our methods; `before`: arguments it adds."""
    uses = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in through:
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and str(name.value).startswith(prefix):
                count = before + sum(_length(one) for one in node.args[1:])
                uses.append(Use(str(name.value), node.lineno, count))
    return uses


def commented_constants(source: Path) -> list[Use]:
    """Numbers of our own whose comment, behind or above, names what they are in the library, in the same order."""
    text = source.read_text()
    lines = text.splitlines()
    uses = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            names = _CONSTANT.findall(lines[(node.end_lineno or node.lineno) - 1].partition("#")[2])
            above = lines[node.lineno - 2].strip()
            if not names and above.startswith("#"):
                names = _CONSTANT.findall(above)
            values = list(_numbers(node.value))
            if len(values) == 1:  # one number by several names
                values *= len(names)
            if names:
                assert len(names) == len(values), f"{source}:{node.lineno}: {names} are not {values}"
            uses += [Use(name, node.lineno, value=value) for name, value in zip(names, values, strict=False)]
    return uses


def strings(source: Path, function: str) -> list[str]:
    """Every string that a function of the source gives away as it stands: keys, values and arguments, no docstrings."""
    (body,) = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    docstring = ast.get_docstring(body, clean=False)
    return [
        node.value
        for node in ast.walk(body)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != docstring
    ]


def first_arguments(source: Path, method: str) -> list[str]:
    """The string that each call of a method begins with."""
    return [
        str(node.args[0].value)
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and isinstance(node.args[0], ast.Constant)
    ]


def _split(node: ast.Attribute, stands_for: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Whose attribute it is, and the way from there."""
    trail: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        trail.insert(0, at.attr)
        at = at.value
        if (name := ast.unparse(at)) in stands_for:
            return name, trail
    return None, trail


def _use(path: str, line: int, call: ast.Call | None) -> Use:
    if call is None or any(isinstance(one, ast.Starred) for one in call.args):
        return Use(path, line)
    return Use(path, line, len(call.args), tuple(one.arg for one in call.keywords if one.arg))


def _numbers(node: ast.expr) -> Iterator[int]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, int):
            yield part.value


def _length(argument: ast.expr) -> int:
    if isinstance(argument, ast.Starred):
        assert isinstance(argument.value, ast.Tuple)
        return len(argument.value.elts)
    return 1
