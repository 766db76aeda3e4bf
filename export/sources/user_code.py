"""A user's Python file, imported as if it were run in its folder.

Knows the import system and how to name the user's line in an error. Knows nothing about torch. Afterwards the user's
folders come first on the path, so it may only be used in the child.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from convoy.export.sources.torch_job import one_line
from convoy.models.checkout import CHECKOUT
from convoy.models.errors import JobError
from convoy.models.samples import some


class Call(NamedTuple):
    """A function or class of a user's file, and the literals it is called with."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})


def parse_call(text: str) -> Call:
    """`factory`, or `Net(3, num_classes=5)`, whose arguments are Python literals. Raises ValueError."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not Python") from error
    if isinstance(tree, ast.Name):
        return Call(tree.id)
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise ValueError(f"{text!r} is not the name of a function, or a call of one")
    try:
        options = {str(one.arg): ast.literal_eval(one.value) for one in tree.keywords if one.arg is not None}
        arguments = tuple(ast.literal_eval(one) for one in tree.args)
    except ValueError as error:
        raise ValueError(f"{text!r} has arguments that are not numbers, strings, lists or the like") from error
    return Call(tree.func.id, arguments, options)


def call_factory(file: Path, text: str) -> Any:
    """What a factory of `file` returns, called as in `text`. Raises JobError for anything that goes wrong in it."""
    call = parse_call(text)
    factory = load_function(file, call.name)
    try:
        return factory(*call.arguments, **call.options)
    except (Exception, SystemExit) as error:
        advice = _missing_arguments(factory, call, file)
        raise JobError(f"{file.name}:{text} failed: {blame(error, file)}{advice}") from error


def _missing_arguments(factory: Any, call: Call, file: Path) -> str:
    """Advice for a call without all arguments; empty if there is none to give."""
    try:
        bound = inspect.signature(factory).bind_partial(*call.arguments, **call.options)
    except (TypeError, ValueError):  # an argument that it does not have, or no signature
        return ""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    lacking = [
        name
        for name, one in bound.signature.parameters.items()
        if one.default is one.empty and one.kind in named and name not in bound.arguments
    ]
    if not lacking:
        return ""
    shown = [*map(repr, call.arguments), *(f"{name}={value!r}" for name, value in call.options.items())]
    whole = ", ".join([*shown, *(f"{name}=..." for name in lacking)])
    return f"; write '{file.name}:{call.name}({whole})' with values for {', '.join(lacking)}"


def load_function(file: Path, name: str) -> Any:
    """The function itself. Raises JobError if it does not exist, and for errors while the file runs."""
    module = load_module(file)
    function = getattr(module, name, None)
    if not callable(function):
        have = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise JobError(f"{file.name} has no function {name!r}; it has {some(have)}")
    return function


def load_module(file: Path) -> ModuleType:
    """The user's file, imported. Raises JobError for errors while it runs."""
    _hand_over(file.parent)
    return _import(file)


def _hand_over(folder: Path) -> None:
    """The file's folder first, as when Python runs it; then the user's current folder."""
    others = [str(Path.cwd()), *sys.path]
    if CHECKOUT is not None:
        # Its root has folders called `app` and `models`, which are not the user's.
        others = [entry for entry in others if Path(entry).resolve() != CHECKOUT]
    sys.path[:] = [str(folder), *others]


def _import(file: Path) -> ModuleType:
    name, root = file.stem, file.parent
    while (root / "__init__.py").exists():  # a module of a package, which may import its siblings relatively
        name, root = f"{root.name}.{name}", root.parent
    try:
        if root != file.parent:
            sys.path.insert(1, str(root))
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs, as Python does: dataclasses and circular imports look it up.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise JobError(f"{file.name} cannot be imported: {blame(error, file)}{_advice(error)}") from error
    return module


def _advice(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "; install it, or run the command in the folder that contains it"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; add an __init__.py to its folder"
    return ""


def blame(error: BaseException, file: Path) -> str:
    """The error with the last line of the user's own file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {one_line(str(error))}{where}"
