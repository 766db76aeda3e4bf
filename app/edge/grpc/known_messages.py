"""What a message around its tensors has meant: a client sends the same around every one of them, but for its id.

What it means depends on these bytes and on the version, as long as all inputs are numbers in `raw_input_contents`. A
message that is known is neither parsed nor checked again: it is copied into one slot, with room for its outputs behind
it, and its answer is written around them as it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from convoy.app.edge.grpc.tensors import ID, MODEL_NAME, RAW_INPUT, Field, fields_of, id_field, response_heads
from convoy.app.edge.oip.answers import answers_of
from convoy.app.edge.oip.inference import InferRequest, has_numbers_alone
from convoy.app.edge.oip.packing import Pattern
from convoy.app.edge.oip.recent import Recent
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Done, Request, TensorPlace
from convoy.models.spec import ModelSpec

# Of one length and one model: those that ask for other outputs, other versions or another priority.
_MOST_ALIKE = 4
# What is around the tensors is compared with each message.
_MOST_BYTES = 4 << 10
_LONGEST_NAME_BYTES = 0x7F


class _Place(NamedTuple):
    """Where to look for what is known: messages of one length that begin with the name of one model."""

    nbytes: int
    beginning: bytes

    @classmethod
    def of(cls, data: bytes) -> _Place:
        # Every encoder that we know of writes the model's name first; for others the length alone has to do.
        has_name = len(data) > 1 and data[0] == MODEL_NAME and data[1] <= _LONGEST_NAME_BYTES
        return cls(len(data), data[: 2 + data[1]] if has_name else b"")


class Outline(NamedTuple):
    """A message without its tensors: `inputs` are where these lie, in the message's order.

    `fixed` are the parts that are the same in each like it, and where they begin. The id, in ASCII, may be another of
    as many bytes.
    """

    place: _Place
    fixed: tuple[tuple[int, bytes], ...]
    id: tuple[int, int]
    inputs: tuple[TensorPlace, ...]

    @classmethod
    def of(cls, data: bytes, inputs: int) -> Outline | None:
        """None where more than what is around them says what its so many inputs are."""
        fields = fields_of(data)
        if fields is None:
            return None
        ids, raw = [[one for one in fields if one.tag == tag] for tag in (ID, RAW_INPUT)]
        # Other inputs are numbers in fields of their own, or in shared memory, which comes and goes.
        if len(raw) != inputs or len(ids) > 1 or not all(data[one.start : one.end].isascii() for one in ids):
            return None
        fixed = tuple(_around([*ids, *raw], data))
        if sum([len(part) for _, part in fixed]) > _MOST_BYTES:
            return None
        own_id = (ids[0].start, ids[0].end) if ids else (0, 0)
        return cls(_Place.of(data), fixed, own_id, tuple([TensorPlace(0, one.start, one.nbytes) for one in raw]))

    def fits(self, data: bytes) -> bool:
        """Whether a message of this length says the same."""
        return all(data.startswith(part, at) for at, part in self.fixed) and self._id(data).isascii()

    def id_in(self, data: bytes) -> str:
        return self._id(data).decode("ascii")

    def _id(self, data: bytes) -> bytes:
        start, end = self.id
        return data[start:end]


class KnownMessage(NamedTuple):
    """What a message meant to one version; `asked` are the names of model and version that it came with.

    Of its `pattern` the whole message is the input. `heads` are what stands before each output in its answer, the first
    with all else but an id.
    """

    outline: Outline
    spec: ModelSpec
    asked: tuple[str, str]
    meaning: InferRequest
    pattern: Pattern
    heads: tuple[bytes, ...]

    def is_for(self, served: Served) -> bool:
        return served.key == self.pattern.like.key and served.spec is self.spec

    def answer(self, own_id: str, done: Done) -> bytes:
        """What `infer_response` makes of it."""
        parts: list[bytes | memoryview] = [id_field(own_id)]
        for head, answer in zip(self.heads, done.answers, strict=True):
            parts += (head, answer.data)
        return b"".join(parts)


class Understood(NamedTuple):
    """A message that was read as it stands, of the version as it was then; `names` are its inputs', in its order."""

    outline: Outline
    names: list[str]
    asked: tuple[str, str]
    spec: ModelSpec
    meaning: InferRequest
    request: Request


class KnownMessages:
    """The last few hundred. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known = Recent[_Place, tuple[KnownMessage, ...]]()

    def find(self, data: bytes) -> KnownMessage | None:
        """What is known of this message."""
        for known in self._known.find(_Place.of(data)) or ():
            if known.outline.fits(data):
                return known
        return None

    def learn(self, understood: Understood, served: Served, done: Done) -> None:
        """For the next ones, from one that is answered; nothing where the next one like it may mean something else."""
        known = _known(understood, served, done)
        if known is None:
            return
        place = known.outline.place
        # What says the same is of a version that is gone.
        others = [one for one in self._known.find(place) or () if one.outline.fixed != known.outline.fixed]
        self._known.keep(place, (known, *others[: _MOST_ALIKE - 1]))


def _known(understood: Understood, served: Served, done: Done) -> KnownMessage | None:
    outline, names, asked, spec, meaning, request = understood
    if not _is_settled(meaning, spec):
        return None
    inputs = dict(zip(names, outline.inputs, strict=True))
    places, sizes = tuple([inputs[one.name] for one in spec.inputs]), [answer.data.nbytes for answer in done.answers]
    pattern = Pattern.of(request, places, outline.place.nbytes, sizes)
    heads = response_heads(None, served, answers_of(meaning, served, done), is_final=False)
    return KnownMessage(outline, spec, asked, meaning, pattern, tuple(heads))


def _around(parts: list[Field], data: bytes) -> Iterator[tuple[int, bytes]]:
    """All that is not the content of one of these, and where it begins."""
    at = 0
    for start, end in [*sorted((one.start, one.end) for one in parts), (len(data), len(data))]:
        if start > at:
            yield at, data[at:start]
        at = end


def _is_settled(meaning: InferRequest, spec: ModelSpec) -> bool:
    is_free = any(spec.outputs[one.index].sample_bytes is None or one.classes or one.place for one in meaning.outputs)
    return not is_free and has_numbers_alone(meaning, spec)
