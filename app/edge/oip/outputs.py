"""Which outputs a request wants, and in which form: the same for every wire.

What could not be encoded after the run is refused before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convoy.app.edge.oip.classification import check_classifiable
from convoy.app.edge.oip.parameters import whole_number
from convoy.app.edge.oip.shared_tensors import REGION, SharedPlace, check_room, shared_place
from convoy.app.edge.oip.tensors import BINARY_ONLY, OutputIn, RawRequest
from convoy.models.errors import InvalidRequest
from convoy.models.spec import ModelSpec

Wrong = Callable[[str], InvalidRequest]


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """An output that the client asked for, and the form in which it wants it.

    `classes` above 0: its largest values as strings. `place`: written there instead of sent.
    """

    index: int
    binary: bool
    classes: int = 0
    place: SharedPlace | None = None


def read_outputs(asked: RawRequest, spec: ModelSpec, samples: int, wrong: Wrong) -> tuple[WantedOutput, ...]:
    """The outputs that are asked for, or all of them. `wrong` makes the error for a message.

    Raises InvalidRequest, and NotFound or Unsupported for shared memory.
    """
    wanted: list[WantedOutput] = []
    if not asked.outputs:
        wanted = [WantedOutput(index, asked.binary_by_default) for index in range(len(spec.outputs))]
    for output in asked.outputs:
        one = _output(output, asked, spec, wrong)
        if any(other.index == one.index for other in wanted):
            raise wrong(f"output '{output.name}' already exists in request")
        wanted.append(one)
    for one in wanted:
        _check_form(one, spec, samples, wrong)
    return tuple(wanted)


def _output(output: OutputIn, asked: RawRequest, spec: ModelSpec, wrong: Wrong) -> WantedOutput:
    names = [spec.name for spec in spec.outputs]
    if output.name not in names:
        raise wrong(f"unexpected inference output '{output.name[:100]}'; the model gives {sorted(names)}")
    parameters, index = output.parameters, names.index(output.name)
    binary = parameters.get("binary_data", asked.binary_by_default)
    if not isinstance(binary, bool):
        raise wrong(f"'binary_data' of output '{output.name}' must be true or false")
    if "classification" not in parameters and REGION not in parameters:
        return WantedOutput(index, binary)
    what = f"output '{output.name}'"
    classes = whole_number(parameters, "classification", what)
    place = shared_place(parameters, what, asked.memory) if REGION in parameters else None
    if classes and place:
        raise wrong("Output can't set both 'shared_memory_region' and 'classification'")
    return WantedOutput(index, binary, classes, place)


def _check_form(wanted: WantedOutput, model: ModelSpec, samples: int, wrong: Wrong) -> None:
    spec = model.outputs[wanted.index]
    if wanted.classes:
        check_classifiable(spec)
    elif wanted.place is not None:
        check_room(wanted.place, spec, samples * (spec.sample_bytes or 0))
    elif spec.dtype in BINARY_ONLY and not wanted.binary:
        raise wrong(
            f"sending {spec.dtype} data via JSON is not supported. "
            f"Please use the binary data format for output {spec.name}"
        )
