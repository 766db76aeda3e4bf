"""Clients that are no good guests: they hurry, flood, leave, send bombs or nonsense; and those of shared memory."""

from __future__ import annotations

import gzip
import json
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.campaign.asks import IMAGES, LARGE_SIDES_PX, SIDES_PX, Ask, Picture, Script, WrongAnswer
from tests.campaign.clients import (
    ORDINARY,
    Client,
    ImageClient,
    Place,
    Raw,
    Said,
    TensorClient,
    TritonGrpc,
    error_words,
    picture_request,
    triton_inputs,
)
from tests.campaign.endings import BOUND_S, outcome_of_status
from tests.campaign.forms import infer_body, infer_path
from tests.support.fuzz import Fuzzer, Range
from tests.support.wire import Wire, head
from tests.support.wire_forms import Region

_REGION_BYTES = 2 << 20
_BOMB_BYTES = 64 << 20


class Shared(TensorClient):
    """System shared memory: inputs and outputs lie in regions of the client's."""

    kind = "shared"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._into, self._out = Region(b"", _REGION_BYTES), Region(b"", _REGION_BYTES)
        self._own: triton_http.InferenceServerClient | None = None
        self._is_registered = False

    def ask(self, number: int) -> Ask:
        # A tensor of strings has no size that a client could know before.
        return self.script.ask(number, models=("simple", "shift", "mean", "identity_fp32"))

    def say(self, number: int) -> Iterator[Said]:
        ask = self.ask(number)
        try:
            client = self._client()
            inputs, offset = [], 0
            for one in ask.inputs:
                self._into.write(one.data, offset)
                own = triton_http.InferInput(one.name, one.shape, one.dtype)
                own.set_shared_memory(self._into.name, len(one.data), offset)
                inputs.append(own)
                offset += len(one.data)
            nbytes = len(ask.inputs[0].data)  # every answer of these models is as large as an input
            self._out.write(b"\xee" * (2 * nbytes), 0)
            outputs = []
            for place, name in enumerate(("OUTPUT0", "OUTPUT1") if ask.model == "simple" else ("y",)):
                wanted = triton_http.InferRequestedOutput(name)
                wanted.set_shared_memory(self._out.name, nbytes, place * nbytes)
                outputs.append(wanted)
            answer = client.infer(ask.model, inputs, outputs=outputs, request_id=ask.id)
        except InferenceServerException as error:
            # The regions are gone with the server that knew them.
            self._is_registered = self._is_registered and "memory region" not in str(error)
            yield self.said(ask, outcome_of_status(int(error.status() or 0)), str(error))
            return
        document, contents = answer.get_response(), self._out.contents
        values = {
            one.name(): np.frombuffer(contents, ask.inputs[0].values.dtype, nbytes // 4, place * nbytes).reshape(
                ask.inputs[0].shape
            )
            for place, one in enumerate(outputs)
        }
        ask.check(document["model_name"], document["model_version"], document.get("id", ""), values)
        yield self.said(ask, "success")

    def _client(self) -> triton_http.InferenceServerClient:
        if self._own is None:
            limits = {"connection_timeout": BOUND_S, "network_timeout": BOUND_S}
            self._own = triton_http.InferenceServerClient(f"127.0.0.1:{self.place.http_port}", **limits)
        if not self._is_registered:
            for region in (self._into, self._out):
                self._own.unregister_system_shared_memory(region.name)
                self._own.register_system_shared_memory(region.name, region.key, region.nbytes)
            self._is_registered = True
        return self._own

    def drop(self) -> None:
        self._is_registered = False
        if self._own is not None:
            self._own.close()
            self._own = None

    def close(self) -> None:
        with suppress(Exception):  # the server may be gone, and then it knows no region either
            if self._own is not None:
                for region in (self._into, self._out):
                    self._own.unregister_system_shared_memory(region.name)
        self.drop()
        for region in (self._into, self._out):
            region.destroy()


class Hurried(Raw):
    """One request after another, each with a deadline, some with a priority."""

    kind = "hurried"

    def asks(self, number: int) -> list[Ask]:
        return [self.script.ask(number * 64, hurried=True)]


class Flood(ImageClient):
    """Forty images at once over one connection, and no deadline."""

    kind = "flood"
    _MANY = 40

    def about(self, number: int) -> tuple[str, str, bool, int]:
        return "predictions", "digits", False, self._MANY

    def say(self, number: int) -> Iterator[Said]:
        pictures = [self.script.picture(number * self._MANY + one, hurried=True) for one in range(self._MANY)]
        with Wire(self.place.http_port, timeout_s=BOUND_S) as wire:
            wire.send(
                b"".join(
                    head("/predictions/digits", {"Content-Length": str(len(one.data))}) + one.data for one in pictures
                )
            )
            for one in pictures:
                reply = wire.reply()
                yield self.judge(one, reply.status, reply.body)
            if left := wire.left_over():
                raise WrongAnswer(f"after {self._MANY} answers there came {left[:80]!r}")


class Heavy(ImageClient):
    """Large files one after another, most of them with a deadline."""

    kind = "heavy"

    def picture(self, number: int) -> Picture:
        return self.script.file(number, LARGE_SIDES_PX, hurried=self.script.chance(number).random() < 0.7)

    def say(self, number: int) -> Iterator[Said]:
        picture = self.picture(number)
        with Wire(self.place.http_port, timeout_s=BOUND_S) as wire:
            wire.send(picture_request(picture))
            reply = wire.reply()
        yield self.judge(picture, reply.status, reply.body)


class PictureLeaver(ImageClient):
    """Goes away in the middle of its upload, or while its file waits, is decoded or is computed."""

    kind = "picture-leaver"

    def picture(self, number: int) -> Picture:
        return self.script.file(number, (*SIDES_PX, LARGE_SIDES_PX[0]))

    def say(self, number: int) -> Iterator[Said]:
        picture, chance = self.picture(number), self.script.chance(number)
        data = picture_request(picture)
        end = chance.randrange(len(data) - len(picture.data), len(data)) if chance.random() < 0.3 else len(data)
        wire = Wire(self.place.http_port, timeout_s=BOUND_S)
        try:
            wire.send(data[:end])
            time.sleep(chance.choice((0.0, 0.001, 0.005, 0.03)))
        finally:
            if chance.random() < 0.7:
                wire.reset()
            else:
                wire.close()
        yield self.said(picture, "left")


class Leaver(TensorClient):
    """Goes away in the middle: of its headers, its body, the wait, the answer."""

    kind = "leaver"

    def ask(self, number: int) -> Ask:
        return self.script.ask(number, models=("identity_fp32", "simple"))

    def say(self, number: int) -> Iterator[Said]:
        ask, chance = self.ask(number), self.script.chance(number)
        body, headers = infer_body(ask)
        data = head(infer_path(ask), {"Content-Length": str(len(body)), **headers}) + body
        way = chance.choice(("headers", "body", "wait", "wait", "answer", "answer"))
        begins = len(data) - len(body)
        end = {"headers": chance.randrange(1, begins - 1), "body": begins + chance.randrange(len(body))}.get(way)
        wire = Wire(self.place.http_port, timeout_s=BOUND_S, receive_buffer=4096)
        try:
            wire.send(data[:end])
            if way == "answer":
                wire.socket.recv(chance.randrange(1, 400))
        finally:
            if chance.random() < 0.7:
                wire.reset()
            else:
                wire.close()
        yield self.said(ask, "left", way)


class GrpcLeaver(TritonGrpc):
    """Cancels its calls, and its streams with some requests in them."""

    kind = "grpc-leaver"

    def ask(self, number: int) -> Ask:
        return self.script.ask(number, models=("identity_fp32", "simple"))

    def say(self, number: int) -> Iterator[Said]:
        chance = self.script.chance(number)
        asks = [self.ask(number * 64 + one) for one in range(chance.choice((1, 1, 20)))]
        client, leaves_after_s = self.client(), chance.choice((0.0, 0.001, 0.01))
        if len(asks) == 1:
            inputs = triton_inputs(triton_grpc, asks[0])
            call = client.async_infer(asks[0].model, inputs, lambda result, error: None, request_id=asks[0].id)
            time.sleep(leaves_after_s)
            call.cancel()
        else:
            client.start_stream(lambda result, error: None)
            with suppress(InferenceServerException):  # the stream has ended by itself; it would have been left anyway
                for ask in asks:
                    client.async_stream_infer(ask.model, triton_inputs(triton_grpc, ask), request_id=ask.id)
            time.sleep(leaves_after_s)
            client.stop_stream(cancel_requests=True)
        for ask in asks:
            yield self.said(ask, "left", "cancelled")


class Bomber(Client):
    """Small bodies with a large inside; each has to be refused in its own words."""

    kind = "bomber"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        zeros = bytes(_BOMB_BYTES)
        self._squeezed = {"gzip": gzip.compress(zeros), "deflate": zlib.compress(zeros)}

    def about(self, number: int) -> tuple[str, str, bool, int]:
        path, _, _ = self._shot(number)
        is_image = path.startswith("/predictions")
        return ("predictions", "digits", True, 1) if is_image else ("v2", "identity_fp32", True, 1)

    def _shot(self, number: int) -> tuple[str, bytes, dict[str, str]]:
        chance = self.script.chance(number)
        side = chance.randrange(20_000, 60_000)
        way = chance.choice(("gzip", "deflate", "png", "gif", "deep", "wide", "image in gzip"))
        if way in self._squeezed:
            return "/v2/models/identity_fp32/infer", self._squeezed[way], {"Content-Encoding": way}
        if way == "image in gzip":
            return "/predictions/digits", self._squeezed["gzip"], {"Content-Encoding": "gzip"}
        if way == "png":
            return "/predictions/digits", huge_png(side), {}
        if way == "gif":
            return "/predictions/digits", b"GIF89a" + struct.pack("<HH", side, side) + IMAGES[0], {}
        if way == "deep":
            return "/v2/models/identity_fp32/infer", b'{"inputs":' + b"[" * 100_000, {}
        shape = {"name": "x", "shape": [1 << 31, 1 << 31], "datatype": "FP32", "data": [1.0]}
        return "/v2/models/identity_fp32/infer", json.dumps({"inputs": [shape]}).encode(), {}

    def say(self, number: int) -> Iterator[Said]:
        protocol, model, _, _ = self.about(number)
        path, body, headers = self._shot(number)
        with Wire(self.place.http_port, timeout_s=BOUND_S) as wire:
            reply = wire.ask(path, body, headers)
        if reply.status == 200:
            raise WrongAnswer(f"a bomb was answered: {reply.body[:100]!r}")
        yield Said(protocol, model, outcome_of_status(reply.status), error_words(reply.body), True)


class Spoiler(Client):
    """Requests that are almost right. What each should be no book can say; only its answer is looked at."""

    kind = "spoiler"

    def __init__(self, place: Place, script: Script) -> None:
        super().__init__(place, script)
        self._range = Range(place.http_port)
        self._fuzzer = Fuzzer(script.seed, "nobody")

    def about(self, number: int) -> tuple[str, str, bool, int]:
        return "any", "any", True, 1

    def say(self, number: int) -> Iterator[Said]:
        shot = self._fuzzer.shot(number)
        try:
            self._range.fire(shot)
            if number % 50 == 0:
                self._range.fire_good()
        except AssertionError as error:
            raise WrongAnswer(f"{shot.what}: {error} to {shot.data[:300]!r}") from error
        yield Said("any", "any", "invalid", shot.what, True)

    def close(self) -> None:
        self._range.close()


def huge_png(side: int) -> bytes:
    """A PNG that says it has side x side pixels; the bytes of one row of zeros, again and again."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = part(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + part(b"IDAT", zlib.compress(bytes(1 << 20))) + part(b"IEND", b"")


KINDS: dict[str, type[Client]] = {
    one.kind: one
    for one in (*ORDINARY, Shared, Hurried, Flood, Heavy, Leaver, PictureLeaver, GrpcLeaver, Bomber, Spoiler)
}
