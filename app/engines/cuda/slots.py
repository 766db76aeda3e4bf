"""The memory and the stream of one batch in flight, allocated once.

A slot has room for the largest batch: on the device for every input and output, and page-locked on the host for
gathering and scattering. Addresses never change, so contexts and graphs can be bound to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import Result
from convoy.app.engines.parts import Landed
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec

# The alignment of cudaMalloc; kernels may require it for every tensor.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """A tensor's offset in a block, and the bytes of one sample, or of the whole tensor without batches."""

    spec: TensorSpec
    offset: int
    sample_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Places for several tensors of up to `samples` samples, one after the other."""

    places: tuple[LayoutEntry, ...]
    nbytes: int

    @staticmethod
    def of(specs: Sequence[TensorSpec], samples: int) -> Layout:
        """Raises BundleError if a size is known only at run time, because such a tensor cannot be placed."""
        places, offset = [], 0
        for spec in specs:
            if spec.sample_bytes is None:
                raise BundleError(f"tensor {spec.name!r} has no fixed size, but GPU memory is allocated once")
            places.append(LayoutEntry(spec, offset, spec.sample_bytes))
            offset += -(-max(1, samples * spec.sample_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return Layout(tuple(places), max(offset, _ALIGNMENT_BYTES))


class DeviceSlot:
    """One batch in flight. Raises EngineFailure if a CUDA call fails."""

    def __init__(self, device: Device, inputs: Layout, outputs: Layout) -> None:
        cuda = self._cuda = device.cuda
        self._inputs, self._outputs = inputs, outputs
        with ExitStack() as owned:

            def own(thing: Result, *give_back: Callable[[Result], None]) -> Result:
                for one in give_back:
                    owned.callback(one, thing)
                return thing

            self.stream = own(cuda.make_stream(), cuda.destroy_stream)
            # Threads wait only for the last.
            events = [
                own(cuda.make_event(sleeps=sleeps), cuda.destroy_event, device.forget)
                for sleeps in (False, False, False, False, device.sleeps)
            ]
            self.begun, self.copied_in, self.computing, self.computed, self.copied_out = events
            sizes = (inputs.nbytes, outputs.nbytes)
            self._device_in, self._device_out = (own(cuda.allocate(nbytes), cuda.free) for nbytes in sizes)
            self._host_in, self._host_out = (own(cuda.allocate_host(nbytes), cuda.free_host) for nbytes in sizes)
            self._staging, self._answers = _bytes_at(self._host_in, inputs), _bytes_at(self._host_out, outputs)
            self._answers_view = self._answers.data
            self._staging.fill(0)
            cuda.clear(self._device_in, inputs.nbytes, self.stream)
            cuda.wait_for_stream(self.stream)
            self._owned = owned.pop_all()

    def device_input(self, index: int) -> int:
        return self._device_in + self._inputs.places[index].offset

    def device_output(self, index: int) -> int:
        return self._device_out + self._outputs.places[index].offset

    def staging(self, index: int) -> np.ndarray:
        """uint8 [bytes]: where the host gathers an input."""
        return self._staging[self._inputs.places[index].offset :]

    def copy_staged_in(self, index: int, nbytes: int) -> None:
        """Copy an input from staging to the device, after the stream's work."""
        source = self._host_in + self._inputs.places[index].offset
        self._cuda.copy_to_device(self.device_input(index), source, nbytes, self.stream)

    def clear_padding(self, samples: int, size: int) -> None:
        """Zero what follows the first samples: data left by an earlier batch may be what made it fail."""
        for index, place in enumerate(self._inputs.places):
            start = self.device_input(index) + samples * place.sample_bytes
            self._cuda.clear(start, (size - samples) * place.sample_bytes, self.stream)

    def copy_out(self, samples: int) -> None:
        """Copy every output's first samples to the host, after the stream's work."""
        for place in self._outputs.places:
            target = self._host_out + place.offset
            self._cuda.copy_to_host(target, self._device_out + place.offset, samples * place.sample_bytes, self.stream)

    def answers(self, samples: int, *, batched: bool) -> list[Landed]:
        """The outputs on the host, in memory that the next batch reuses: [samples, ...] if `batched`."""
        landed = []
        for place in self._outputs.places:
            end = place.offset + samples * place.sample_bytes
            shape = (samples, *place.spec.shape) if batched else place.spec.shape
            array = self._answers[place.offset : end].view(place.spec.numpy_dtype).reshape(shape)
            landed.append(Landed(array, self._answers_view[place.offset : end]))
        return landed

    def close(self) -> None:
        """Free everything. The stream must be idle."""
        self._owned.close()


def _bytes_at(address: int, layout: Layout) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * layout.nbytes).from_address(address))
