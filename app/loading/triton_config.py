"""Read the `config.pbtxt` of a bare model: each field is honoured, ignored because no answer depends on it, or refused
with a reason. `convoy.app.loading.config_fields` has the table.

All mistakes of a file are reported at once. Those of its text and its fields are found here; those that depend on the
graph are found after it was read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from convoy.app.engines.base import Signature
from convoy.app.loading.config_fields import harmless, refused
from convoy.models.errors import BundleError
from convoy.models.files import is_file_name, open_regular, read_small, stays_inside
from convoy.models.priorities import ORDINARY_PRIORITIES, Priorities
from convoy.models.spec import TensorSpec
from convoy.models.store import BARE_MODEL, CONFIG, StoredVersion, is_version
from convoy.models.version_policy import Latest, Policy

_log = logging.getLogger("convoy")

_MOST_TOLD = 50  # mistakes of one file
# Of `parameters`, "true" or "false": whether batches are formed although the check of the rows objects.
ROWS_ARE_INDEPENDENT = "convoy_rows_are_independent"
_CHECKSUM, _MD5 = "checksum", "MD5:"
_INSTEAD = {
    "tensorflow": "convert the model with tf2onnx",
    "pytorch": "export the network with `convoy export`",
    "tensorrt": "use the ONNX file that the plan was built from; Convoy builds plans itself",
    "openvino": "use the ONNX file; Convoy runs it with OpenVINO where that is faster",
    "python": "Convoy does not run model code; move the computation into the ONNX graph, or call Convoy from your code",
    "dali": "Convoy decodes images itself: export the network with `convoy export --preprocess`",
    "onnx": "use that, or remove the field",
    "ensemble": "join the graphs into one ONNX file (onnx.compose), or call the models one after the other",
}


@dataclass(frozen=True, slots=True)
class ConfiguredTensor:
    """One entry of `input` or `output`. An empty `dtype` or `dims` means the graph's."""

    name: str
    dtype: str = ""
    dims: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is honoured; without a file nothing is set, and `max_batch_size` is None.

    `mistakes` are those of the file alone; `serves_onnx` means that its model is an ONNX model.
    """

    path: Path
    max_batch_size: int | None = None
    inputs: tuple[ConfiguredTensor, ...] = ()
    outputs: tuple[ConfiguredTensor, ...] = ()
    priorities: Priorities = ORDINARY_PRIORITIES
    model_file: str = BARE_MODEL
    rows_are_independent: bool = False
    mistakes: tuple[str, ...] = ()
    serves_onnx: bool = True

    def labels(self, output: str) -> tuple[str, ...]:
        return next((one.labels for one in self.outputs if one.name == output), ())

    def dims(self, tensor: TensorSpec, own: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor's sizes, if the graph has `own`: those that either of them fixes."""
        named = [one.dims for one in (*self.inputs, *self.outputs) if one.name == tensor.name and one.dims]
        return tuple(b if a < 0 else a for a, b in zip(named[0], own, strict=True)) if named else own

    def objections_to(self, graph: Signature) -> tuple[str, ...]:
        """Where it and the graph disagree."""
        inputs = _side("input", self.inputs, graph.inputs, self.max_batch_size)
        return (*inputs, *_side("output", self.outputs, graph.outputs, self.max_batch_size))

    def refuse(self, mistakes: tuple[str, ...]) -> None:
        """Raise BundleError if there are any mistakes."""
        if len(mistakes) == 1:
            raise BundleError(f"{self.path}: {mistakes[0]}")
        if mistakes:
            told = "; ".join(f"({number}) {one}" for number, one in enumerate(mistakes[:_MOST_TOLD], 1))
            raise BundleError(f"{self.path}: {len(mistakes)} mistakes: {told}")


def read_configuration(stored: StoredVersion) -> Configuration:
    """A bare version's configuration. Raises BundleError if it cannot be read at all."""
    path = stored.model_folder / CONFIG
    if not os.path.lexists(path):
        return Configuration(path)
    try:
        data = read_small(path)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error}); fix or remove it") from error
    message, mistakes = _parse(data, str(path))
    for line in harmless(message):
        _log.debug("%s: %s", path, line)
    return _Reading(stored, path, message, list(mistakes)).configuration()


def version_policy(data: bytes, where: str) -> Policy | None:
    """The version policy of a configuration, None if it has none. Raises BundleError."""
    if b"version_policy" not in data:
        return None  # as in most files; importing protobuf takes a second
    message, _ = _parse(data, where)
    return _policy(message, f"{where}: ")


def _policy(message: Any, where: str = "") -> Policy | None:
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "latest":
            return Latest(max(1, policy.latest.num_versions))
        case "all":
            return "all"
        case "specific":
            versions = tuple(policy.specific.versions)
            if not versions or min(versions) < 1:
                raise BundleError(
                    f"{where}version_policy specific names {list(versions)}; versions start at 1; fix or remove it"
                )
            return versions
    return None


class _Reading:
    """One file, field by field, and its mistakes."""

    def __init__(self, stored: StoredVersion, path: Path, message: Any, mistakes: list[str]) -> None:
        self._stored, self._path, self._message, self._mistakes = stored, path, message, mistakes

    def configuration(self) -> Configuration:
        message, mistakes = self._message, self._mistakes
        serves_onnx = self._check_platform()
        if message.name and message.name != (own := self._stored.name):
            mistakes.append(f"name is {message.name!r}, but the model is {own!r}; use the same name, or remove it")
        mistakes += refused(message)
        try:
            _policy(message)
        except BundleError as error:
            mistakes.append(str(error))
        if message.max_batch_size < 0:
            mistakes.append(f"max_batch_size is {message.max_batch_size}; set it to 0 or more")
        inputs, outputs = (tuple(map(self._tensor, side)) for side in (message.input, message.output))
        for name, count in Counter(one.name for one in (*inputs, *outputs)).items():
            if count > 1 and name:
                mistakes.append(f"tensor {name!r} is listed {count} times; list it once")
        priorities, rows_are_independent = self._priorities(), self._rows_are_independent()
        model_file = message.default_model_filename or BARE_MODEL
        if not is_file_name(model_file):
            mistakes.append(f"default_model_filename {model_file!r} is not the name of a file in {self._stored.folder}")
            model_file = BARE_MODEL
        mistakes += self._mistakes_of_agents()
        return Configuration(
            self._path,
            max(0, message.max_batch_size),
            inputs,
            outputs,
            priorities,
            model_file,
            rows_are_independent,
            tuple(mistakes),
            serves_onnx,
        )

    def _check_platform(self) -> bool:
        """Whether the model is an ONNX model."""
        message = self._message
        known = ("platform", message.platform, "onnxruntime_onnx"), ("backend", message.backend, "onnxruntime")
        others = [(field, value) for field, value, own in known if value not in ("", own)]
        for field, value in others:
            instead = next((words for name, words in _INSTEAD.items() if name in value), "convert the model to ONNX")
            self._mistakes.append(f"{field} is {value!r}, but Convoy only serves ONNX (onnxruntime_onnx); {instead}")
        return not others and not message.HasField("ensemble_scheduling")

    def _tensor(self, tensor: Any) -> ConfiguredTensor:
        side = "output" if "label_filename" in tensor.DESCRIPTOR.fields_by_name else "input"
        what, dims = f"{side} {tensor.name!r}", tuple(tensor.dims)
        if not tensor.name:
            self._mistakes.append(f"an {side} has no name; use one of the graph's names")
        if any(size < 1 and size != -1 for size in dims):
            self._mistakes.append(f"{what} has dims {list(dims)}; sizes must be at least 1, or -1 if variable")
        if tensor.HasField("reshape") and tuple(tensor.reshape.shape) != dims:
            self._mistakes.append(
                f"{what}: reshape is not supported; remove it and set dims to the graph's shape, which clients then "
                "send and receive"
            )
        dtype = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
        dtype = {"TYPE_INVALID": "", "TYPE_STRING": "BYTES"}.get(dtype, dtype.removeprefix("TYPE_"))
        labels = self._labels(tensor.label_filename) if side == "output" and tensor.label_filename else ()
        return ConfiguredTensor(tensor.name, dtype, dims, labels)

    def _labels(self, name: str) -> tuple[str, ...]:
        folder = self._path.parent
        try:
            if stays_inside(name):
                return tuple(read_small(folder / name).decode().splitlines())
            self._mistakes.append(f"label_filename {name!r} is outside {folder}; move the labels there")
        except (OSError, ValueError, BundleError) as error:
            self._mistakes.append(f"cannot read label_filename {name} ({error})")
        return ()

    def _priorities(self) -> Priorities:
        batching = self._message.dynamic_batching
        levels, default = batching.priority_levels, batching.default_priority_level
        try:
            return Priorities(levels, default) if levels or default else Priorities()
        except BundleError as error:
            self._mistakes.append(f"{error}; correct priority_levels or default_priority_level in dynamic_batching")
            return Priorities()

    def _rows_are_independent(self) -> bool:
        ours = {key: one.string_value for key, one in self._message.parameters.items() if key.startswith("convoy_")}
        value = ours.pop(ROWS_ARE_INDEPENDENT, "false")
        for key in sorted(ours):
            self._mistakes.append(f"unknown parameter {key!r}; the only one is {ROWS_ARE_INDEPENDENT}")
        if value not in ("true", "false"):
            self._mistakes.append(f'parameter {ROWS_ARE_INDEPENDENT} is {value!r}; set it to "true" or "false"')
        return bool(value == "true")

    def _mistakes_of_agents(self) -> Iterator[str]:
        for agent in self._message.model_repository_agents.agents:
            if agent.name == _CHECKSUM:
                yield from filter(None, (self._objection_to_digest(*pair) for pair in sorted(agent.parameters.items())))
            else:
                yield (
                    f"model_repository_agents: agent {agent.name!r} is not supported, only {_CHECKSUM}; remove it, and "
                    "store the files as they should be served"
                )

    def _objection_to_digest(self, key: str, digest: str) -> str:
        name = key.removeprefix(_MD5)
        if name == key:
            return f"checksum {key!r}: only {_MD5}FILE is supported; fix or remove it"
        if not stays_inside(name):
            return f"checksum of {name!r}: is outside {self._path.parent}; use a file in that folder"
        first = Path(name).parts[0]
        if is_version(first) and not self._stored.is_flat and first != str(self._stored.version):
            return ""  # another version's, which is checked when that one is loaded
        try:
            with open_regular(self._path.parent / name) as file:
                found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except (OSError, BundleError) as error:
            return f"checksum of {name!r}: cannot read the file ({error})"
        if found == digest.strip().lower():
            return ""
        return f"checksum of {name!r}: its MD5 is {found}, not {digest}; restore the file, or correct the MD5"


def _side(
    side: str, named: tuple[ConfiguredTensor, ...], own: tuple[TensorSpec, ...], max_batch_size: int | None
) -> Iterator[str]:
    """Where one side of the graph differs from the configuration."""
    graph = {spec.name: spec for spec in own}
    for one in named:
        if one.name and one.name not in graph:
            yield f"{side} {one.name!r} is not in the graph, which has {', '.join(graph)}; use one of these"
    by_name = {one.name: one for one in named}
    for spec in own:
        yield from _tensor(side, by_name.get(spec.name, ConfiguredTensor(spec.name)), spec, max_batch_size)


def _tensor(side: str, named: ConfiguredTensor, spec: TensorSpec, max_batch_size: int | None) -> Iterator[str]:
    what = f"{side} {spec.name!r}"
    if named.dtype not in ("", spec.dtype):
        yield f"{what} is {named.dtype} in {CONFIG} but {spec.dtype} in the graph; make them equal"
    if max_batch_size and spec.shape[:1] != (-1,):
        yield f"{what} has no dynamic first dimension in the graph; set max_batch_size to 0"
        return
    sizes = spec.shape[1:] if max_batch_size else spec.shape
    is_fit = len(named.dims) == len(sizes) and all(
        a == b or -1 in (a, b) for a, b in zip(named.dims, sizes, strict=True)
    )
    if named.dims and not is_fit:
        batch = ", without its first dimension, the batch" if max_batch_size else ""
        yield f"{what} has dims {list(named.dims)}, but the graph has {list(sizes)}{batch}; make them equal"


def _parse(data: bytes, where: str) -> tuple[Any, tuple[str, ...]]:
    """The message, as far as it could be read, and the unknown fields, each with its line.

    `where` is the file's name in errors. Raises BundleError if it is not ModelConfig in protobuf's text format.
    """
    # Imported here, because it imports grpc, which only a config.pbtxt needs.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    kind: Any = model_config_pb2.ModelConfig
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BundleError(f"{where}: line {line}: is not UTF-8; write it as UTF-8 text") from error
    unknown: list[tuple[int, str]] = []
    mistakes: list[str] = []
    try:
        with suppress(text_format.ParseError):  # what comes before a mistake in the text counts
            unknown.extend(_in_message(text_format.Tokenizer(text.split("\n")), kind.DESCRIPTOR, ""))
        mistakes += [f"line {line}: {words}" for line, words in unknown[:_MOST_TOLD]]
        return text_format.Parse(text, kind(), allow_unknown_field=bool(unknown)), tuple(mistakes)
    except RecursionError as error:
        raise BundleError(
            f"{where}: cannot be read: its braces are nested too deeply; correct it or remove it"
        ) from error
    except text_format.ParseError as error:
        # The parser stops at its first mistake, which may be an unknown field that it cannot skip.
        if error.GetLine() not in [line for line, _ in unknown]:
            mistakes.append(_told(error, text))
        raise BundleError(f"{where}: cannot be read: {'; '.join(mistakes)}; correct it or remove it") from error


def _told(error: Exception, text: str) -> str:
    """Without the line itself, which may be as long as the file."""
    place = re.match(r"(\d+):(\d+) : ", str(error))
    words = str(error)[place.end() if place else 0 :].replace('"inference.', '"')
    if place is None:
        return words
    line = text.split("\n")[int(place[1]) - 1]
    words = " ".join(words.removeprefix(f"'{line}': ").split()).rstrip(".")
    return f"line {place[1]}, column {place[2]}: {words}"


def _in_message(tokens: Any, descriptor: Any, end: str) -> Iterator[tuple[int, str]]:
    """The unknown fields of a message up to `end`, each with its line: all of them, where the parser names one.

    The contents of an unknown field, which has no descriptor, are skipped.
    """
    while not tokens.AtEnd() and not tokens.LookingAt(end):
        line = tokens.ParseError("").GetLine()
        name = tokens.ConsumeIdentifier()
        field = None if descriptor is None else descriptor.fields_by_name.get(name)
        if descriptor is not None and field is None:
            near = get_close_matches(name.lower(), descriptor.fields_by_name, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield line, f"{descriptor.name} has no field {name!r}{hint}"
        tokens.TryConsume(":")
        yield from _in_value(tokens, None if field is None else field.message_type)
        if not tokens.TryConsume(";"):
            tokens.TryConsume(",")


def _in_value(tokens: Any, descriptor: Any) -> Iterator[tuple[int, str]]:
    for start, end in ("{}", "<>"):
        if tokens.TryConsume(start):
            yield from _in_message(tokens, descriptor, end)
            tokens.Consume(end)
            return
    if tokens.TryConsume("["):
        while not tokens.TryConsume("]"):
            if tokens.AtEnd():
                raise tokens.ParseError('Expected "]"')
            yield from _in_value(tokens, descriptor)
            tokens.TryConsume(",")
        return
    if tokens.token[:1] in ("'", '"'):
        tokens.ConsumeByteString()  # with all pieces of the text
    else:
        tokens.TryConsume("-")
        tokens.NextToken()
