"""A tensorrt or tensorrt_rtx module made from the recorded surface of a real one (`tests.support.tensorrt_surface`).

Every class, method, property and enum of the recording is there with its recorded signatures, and nothing
else: a name, a keyword or a type that this version does not have raises, as the real bindings would. What a
method does is played by the function that `plays` has for it (`tests.support.tensorrt_play` for the builder);
what is not played raises NotImplementedError.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

VERSIONS = ("10.16", "11.4")
RTX = "rtx-1.7"
_DATA = Path(__file__).parent.parent / "data"
RTX_RECORDING = _DATA / "tensorrt-rtx-api-1.7.json"
_RECORDINGS = {version: ("tensorrt", _DATA / f"tensorrt-api-{version}.json") for version in VERSIONS}
_RECORDINGS[RTX] = ("tensorrt_rtx", RTX_RECORDING)
_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")

# (class, member) -> what it does: a method gets the object and its arguments by name, a property the object.
Plays = Mapping[tuple[str, str], Callable[..., Any]]


class EnumValue:
    """A member of a bound enum: equal to itself alone, convertible to int."""

    def __init__(self, kind: str, name: str, value: int) -> None:
        self.kind, self.name, self.value = kind, name, value

    def __int__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"<{self.kind}.{self.name}: {self.value}>"


class _Bindings(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        if not made.state.get("constructed"):
            raise TypeError(f"{cls.__mro__[1].__name__}.__init__() must be called when overriding __init__")
        return made


class Bound(metaclass=_Bindings):
    """An object of the bindings: `state` is what the play keeps; other attributes only in Python subclasses."""

    state: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "state", {})
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        is_bound = "recorded" in type(self).__dict__
        if is_bound and not isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, value)


class HostMemory(bytes):
    """IHostMemory: a buffer with two properties, and not a sequence: only `bytes` and `memoryview` open it."""

    nbytes = property(lambda self: memoryview(self).nbytes)
    dtype = property(lambda self: EnumValue("DataType", "INT8", 2))

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name not in ("nbytes", "dtype"):
            raise AttributeError(f"IHostMemory has no attribute {name!r}")
        return bytes.__getattribute__(self, name)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise TypeError("object of type IHostMemory has no len()")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("'IHostMemory' object is not subscriptable")

    def __iter__(self) -> Any:
        raise TypeError("'IHostMemory' object is not iterable")


def make_fake(version: str, plays: Plays) -> Any:
    """The module of a version in VERSIONS, or of RTX."""
    name, recording = _RECORDINGS[version]
    surface = json.loads(recording.read_text())
    module = ModuleType(name)
    module.__version__ = surface["version"]  # type: ignore[attr-defined]
    severities = {name: EnumValue("Severity", name, value) for value, name in enumerate(_SEVERITIES)}
    # TensorRT's inspector was recorded under its C++ name, where there is nothing: RTX has the same one.
    inspector = json.loads(RTX_RECORDING.read_text())["classes"]["EngineInspector"]
    for name, members in ({"EngineInspector": inspector} | surface["classes"]).items():
        if members is not None:
            setattr(module, name, _make_class(module, name, members, severities, plays))
    unknown = {key for key in plays if not hasattr(getattr(module, key[0], None), key[1])}
    for name in surface["functions"]:
        setattr(module, name, _unplayed(name))
    # A play for a name that this version lacks would hide the very mistakes that the fake is for.
    assert not unknown, f"not in TensorRT {version}: {unknown}"
    return module


def new(module: Any, kind: str, **state: Any) -> Any:
    """An object as the library itself would make it."""
    made = getattr(module, kind).__new__(getattr(module, kind))
    made.state.update(state)
    return made


def _make_class(
    module: ModuleType, kind: str, members: dict[str, Any], severities: dict[str, EnumValue], plays: Plays
) -> type:
    body: dict[str, Any] = {"recorded": True, "module": module}
    for index, (name, what) in enumerate(members.items()):
        if what == "enum":
            body[name] = EnumValue(kind, name, index)
        elif what == "attribute":
            body[name] = severities[name]
        elif what == "property":
            body[name] = _property(kind, name, plays)
        elif name == "__init__":
            body[name] = _constructor(module, kind, what, plays)
        elif isinstance(what, list) and any("(" in text and "->" in text for text in what):
            body[name] = _method(module, kind, name, what, plays)
    return type(kind, (Bound,), body)


def _property(kind: str, name: str, plays: Plays) -> property:
    play = plays.get((kind, name))

    def get(self: Bound) -> Any:
        if play is not None:
            return play(self)
        if name not in self.state:
            raise NotImplementedError(f"{kind}.{name} was never set and is not played")
        return self.state[name]

    def put(self: Bound, value: Any) -> None:
        if play is not None:
            raise AttributeError(f"property {name!r} of {kind!r} object has no setter")
        before = self.state.get(name)
        if isinstance(before, EnumValue) and not (isinstance(value, EnumValue) and value.kind == before.kind):
            raise TypeError(f"{kind}.{name} takes a {before.kind}, not {value!r}")
        self.state[name] = value

    return property(get, put)


def _constructor(module: ModuleType, kind: str, texts: list[str], plays: Plays) -> Callable[..., None]:
    if not any("->" in text for text in texts):
        return _no_constructor(kind)
    call = _method(module, kind, "__init__", texts, plays)

    def construct(self: Bound, *args: Any, **kwargs: Any) -> None:
        self.state["constructed"] = True
        if (kind, "__init__") in plays:
            call(self, *args, **kwargs)
        else:
            _bound_arguments(module, kind, texts, self, args, kwargs)

    return construct


def _no_constructor(kind: str) -> Callable[..., None]:
    def refuse(self: Bound, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{kind}: No constructor defined!")

    return refuse


def _method(module: ModuleType, kind: str, name: str, texts: list[str], plays: Plays) -> Callable[..., Any]:
    def method(self: Bound, *args: Any, **kwargs: Any) -> Any:
        arguments = _bound_arguments(module, f"{kind}.{name}", texts, self, args, kwargs)
        if (kind, name) not in plays:
            raise NotImplementedError(f"{kind}.{name} is not played")
        return plays[kind, name](self, **arguments)

    return method


def _unplayed(name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not played")

    return function


def _bound_arguments(
    module: ModuleType, where: str, texts: list[str], self: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name, by the first overload that takes them, without self."""
    for text in texts:
        parameters = parse_signature(text)
        try:
            bound = inspect.Signature(parameters).bind(self, *args, **kwargs)
        except TypeError:
            continue
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        kinds = {parameter.name: parameter.annotation for parameter in parameters}
        nullable = {parameter.name for parameter in parameters if parameter.default == "None"}
        if all(
            (value is None and name in nullable) or _fits(module, kinds[name], value) for name, value in given.items()
        ):
            return given
    raise TypeError(f"{where}(): incompatible function arguments: {args} {kwargs}; it takes {texts}")


def parse_signature(text: str) -> list[inspect.Parameter]:
    """The parameters of "name(self: X, a: T = d) -> R", annotations and defaults as text."""
    inner = text[text.index("(") + 1 : text.rindex(") ->")]
    parameters = []
    for part in _split(inner):
        name, _, rest = part.partition(":")
        annotation, has_default, text_of_default = rest.strip().partition(" = ")
        default = text_of_default if has_default else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name.strip(), kind, default=default, annotation=annotation))
    return parameters


def _split(inner: str) -> list[str]:
    parts, depth = [""], 0
    for character in inner:
        depth += (character in "[(<{") - (character in "])>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]


def _fits(module: ModuleType, annotation: str, value: Any) -> bool:
    kind = annotation.rpartition("::")[2]
    if kind in ("str", "bool"):
        return type(value) is {"str": str, "bool": bool}[kind]
    if kind in ("int", "typing.SupportsInt"):
        return hasattr(value, "__int__")
    if kind == "typing_extensions.Buffer":
        return isinstance(value, bytes | bytearray | memoryview)
    if kind == "Dims":
        return isinstance(value, tuple | list) and all(isinstance(size, int) for size in value)
    bound = getattr(module, kind, None)
    if isinstance(bound, type):
        return (isinstance(value, EnumValue) and value.kind == kind) or isinstance(value, bound)
    return True
