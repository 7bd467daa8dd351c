"""A build loaded into this process, and how the CPU runs a block's threads."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch

from jit.cache import Build
from jit.packed import PREFIX
from jit.signature import Export
from jit.source import Target


class Schedule(NamedTuple):
    """How the CPU runs a block's threads."""

    target: Target  # with or without a check for races
    order: int  # 0 forward, 1 reverse, 2 random
    seed: int


SCHEDULES = {
    "forward": Schedule(Target("cpu"), 0, 0),
    "reverse": Schedule(Target("cpu"), 1, 0),
    "random": Schedule(Target("cpu"), 2, 0),
    "races": Schedule(Target("cpu", races=True), 0, 0),
}
FORWARD = SCHEDULES["forward"]
schedule: contextvars.ContextVar[Schedule] = contextvars.ContextVar("cpu_schedule", default=FORWARD)


@contextlib.contextmanager
def cpu_schedule(order: Literal["forward", "reverse", "random", "races"], seed: int = 0) -> Iterator[None]:
    """The order in which the CPU backend runs a block's threads, for calls inside the with statement.

    `seed` is of the random order. "races" is the forward order in a build of its own that watches each access
    to memory, slower by far, and reports two threads that use an address with no barrier between them.
    """
    if order not in SCHEDULES:
        raise ValueError(f"order: expected one of {', '.join(SCHEDULES)}, got {order!r}")
    token = schedule.set(SCHEDULES[order]._replace(seed=seed % 2**64))
    try:
        yield
    finally:
        schedule.reset(token)


class Library:
    """A compiled library, loaded into this process."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.handle = ctypes.CDLL(str(build.library))

    def function(self, export: Export) -> Callable[[bytes, int | None], int]:
        """The C function that takes arguments as `layout(export)` packs them, and the stream."""
        self.handle[export.name]  # raises AttributeError where an #if left it out
        function = self.handle[PREFIX + export.name]
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        return function

    def on_cpu(self, export: Export) -> Callable[..., int]:
        """A call on the CPU: order and seed, then the packed arguments."""
        function = self.function(export)
        try:
            set_order = self.handle.cpu_schedule
        except AttributeError:  # a source without cuda.cuh
            return lambda order, seed, packed: function(packed, None)
        set_order.argtypes = [ctypes.c_int, ctypes.c_uint64]

        def call(order: int, seed: int, packed: bytes) -> int:
            set_order(order, seed)
            return function(packed, None)

        return call

    def on_gpu(self, export: Export, index: int) -> Callable[[bytes], int]:
        """A call on a GPU, on its current stream, with the packed arguments."""
        function = self.function(export)
        current_device, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def call(packed: bytes) -> int:
            if current_device() == index:
                return function(packed, stream_of(index))
            with torch.cuda.device(index):
                return function(packed, stream_of(index))

        return call

    def error_text(self, code: int) -> str:
        """What a function's result means, in CUDA's or the CPU backend's words."""
        try:
            words = self.handle.kernel_error_text
        except AttributeError:
            return f"error {code}"
        words.restype = ctypes.c_char_p
        return words(code).decode(errors="replace")
