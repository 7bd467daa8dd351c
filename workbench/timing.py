"""Time calls against each other, in one run, with their samples interleaved.

What is measured (all in µs for one call):

- *p20, p50, p80*: kernel time, percentiles over samples. A small call (`in_graph`) is captured several times
  into a CUDA graph over all sets of inputs, and a sample is one pair of events around several replays, so
  that neither the host nor the events' own cost is in it; its inputs stay in the L2 cache. A large call is
  made directly between two events, after writes of FLUSH_BYTES that empty the L2 cache, as many as keep the
  GPU busy while the host enqueues the whole call: the GPU never waits for the host between its kernels.
- *call*: wall time of calls made back to back, one synchronisation at their end included, without a graph:
  what a loop in Python pays.

On the CPU, which only stands in for a GPU, all times are wall time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

Inputs = tuple[Tensor, ...]
Sampler = Callable[[], tuple[float, list[Tensor]]]  # → µs for one call, the outputs of the timed calls

FLUSH_BYTES = 2**30
HEAD_START = 1.5  # the host's lead over the GPU, in times that it takes to enqueue a call
CALLS_IN_GRAPH = 20
SAMPLE_US = 2000  # a sample of graph replays takes about this long
SAMPLES = (5, 40)  # fewest and most samples for one candidate
SAMPLING_US = 1e6  # and about this much time in between …
LONGEST_US = 5e6  # … but for what is so slow that even the fewest samples would take longer
CALLING_US = 2e4  # a batch of back-to-back calls takes about this long


@dataclass(frozen=True)
class Candidate:
    """Something to time."""

    name: str
    call: Callable[..., Tensor]  # what a user would call
    body: Callable[..., Tensor] | None = None  # captured in place of `call`, when that replays a graph
    capturable: bool = True  # False: timed as a call even where others are captured


class Timing(NamedTuple):
    """What one candidate took."""

    p20_us: float
    p50_us: float
    p80_us: float
    call_us: float
    peak_mib: float  # most memory in use during a call beyond inputs and parameters, the output included
    outputs: list[Tensor]  # of the last timed calls, one for each set of inputs


def compare(
    candidates: Sequence[Candidate], inputs: Sequence[Inputs], *, in_graph: bool, progress: bool = False
) -> dict[str, Timing]:
    """Time candidates on the same sets of inputs, taking a sample of each in turn.

    Kernel times are of one call each, averaged over the sets of inputs. `outputs` lets the caller check what
    the timed calls computed.
    """
    peaks = {candidate.name: peak_mib(candidate.call, inputs) for candidate in candidates}
    samplers = {candidate.name: _sampler(candidate, inputs, in_graph) for candidate in candidates}
    samples, outputs = _interleave(samplers, progress)
    calls = {candidate.name: call_us(candidate.call, inputs) for candidate in candidates}
    return {
        name: Timing(*percentiles(taken), calls[name], peaks[name], outputs[name])
        for name, taken in samples.items()
    }


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.quantile(torch.tensor(samples, dtype=torch.float64), quantiles).tolist()
    return p20, p50, p80


def _interleave(
    samplers: Mapping[str, Sampler], progress: bool
) -> tuple[dict[str, list[float]], dict[str, list[Tensor]]]:
    """Samples of all, one of each in turn; slow ones stop early. And the outputs of their last.

    Each turn has another order: a kernel that draws much power can slow down the one after it, which must not
    be the same one always.
    """
    first = {name: sampler()[0] for name, sampler in samplers.items()}  # not counted: a warm-up
    wanted = {name: _samples_for(us) for name, us in first.items()}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    outputs: dict[str, list[Tensor]] = {}
    turns = max(wanted.values(), default=0)
    for turn in tqdm(range(turns), desc="timing", unit="sample", disable=not progress, leave=False):
        for name in random.Random(turn).sample(list(samplers), len(samplers)):
            if turn < wanted[name]:
                us, outputs[name] = samplers[name]()
                samples[name].append(us)
    return samples, outputs


def _samples_for(us: float) -> int:
    fewest, most = SAMPLES
    if fewest * us > LONGEST_US:
        return max(2, int(LONGEST_US / us))
    return max(fewest, min(most, int(SAMPLING_US / max(us, SAMPLE_US))))


def _sampler(candidate: Candidate, inputs: Sequence[Inputs], in_graph: bool) -> Sampler:
    if inputs[0][0].device.type == "cpu":
        return _wall_sampler(candidate.call, inputs)
    if in_graph and candidate.capturable:
        return _graph_sampler(candidate.body or candidate.call, inputs)
    return (
        _back_to_back_sampler(candidate.call, inputs)
        if in_graph
        else _flushed_sampler(candidate.call, inputs)
    )


def _wall_sampler(call: Callable[..., Tensor], inputs: Sequence[Inputs]) -> Sampler:
    def sample() -> tuple[float, list[Tensor]]:
        start = time.perf_counter()
        outputs = [call(*each) for each in inputs]
        return 1e6 * (time.perf_counter() - start) / len(inputs), outputs

    return sample


def _graph_sampler(body: Callable[..., Tensor], inputs: Sequence[Inputs]) -> Sampler:
    """Replays of a graph that holds CALLS_IN_GRAPH calls, or a few more."""
    rounds = math.ceil(CALLS_IN_GRAPH / len(inputs))

    def all_calls() -> list[Tensor]:
        for _ in range(rounds):
            outputs = [body(*each) for each in inputs]
        return outputs

    graph, outputs = capture(all_calls)
    replays = max(1, math.ceil(SAMPLE_US / events_us(graph.replay)))

    def sample() -> tuple[float, list[Tensor]]:
        us = events_us(lambda: [graph.replay() for _ in range(replays)])
        return us / (replays * rounds * len(inputs)), outputs

    return sample


def capture(calls: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A CUDA graph of these calls, and the memory in which each replay leaves their outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their workspace in the first calls on a stream
        for _ in range(3):
            calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = calls()
    graph.replay()
    torch.cuda.synchronize()
    return graph, outputs


def _back_to_back_sampler(call: Callable[..., Tensor], inputs: Sequence[Inputs]) -> Sampler:
    """Calls as Python makes them, so that a GPU that waits for the host is counted as busy."""
    rounds = math.ceil(CALLS_IN_GRAPH / len(inputs))
    outputs: list[Tensor] = []

    def all_calls() -> None:
        for _ in range(rounds):
            outputs[:] = [call(*each) for each in inputs]

    def sample() -> tuple[float, list[Tensor]]:
        return events_us(all_calls) / (rounds * len(inputs)), outputs

    return sample


def _flushed_sampler(call: Callable[..., Tensor], inputs: Sequence[Inputs]) -> Sampler:
    """One call between two events, the L2 cache empty; the sets of inputs take turns."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=inputs[0][0].device)
    flush.zero_()
    outputs: list[Tensor] = [call(*each) for each in inputs]
    flushes = math.ceil(HEAD_START * enqueuing_us(lambda: call(*inputs[0])) / events_us(flush.zero_))
    turn = 0

    def sample() -> tuple[float, list[Tensor]]:
        nonlocal turn
        turn = (turn + 1) % len(inputs)
        outputs[turn] = None  # its memory is free for the new output
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            flush.zero_()
        start.record()
        outputs[turn] = call(*inputs[turn])
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop), outputs

    return sample


def enqueuing_us(work: Callable[[], object], times: int = 5) -> float:
    """The longest of several times, in µs, that the host takes to enqueue `work` on an idle GPU."""
    longest = 0.0
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        longest = max(longest, 1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return longest


def events_us(work: Callable[[], object]) -> float:
    """GPU time in µs from the start to the end of what `work` enqueues."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop)


def call_us(call: Callable[..., Tensor], inputs: Sequence[Inputs], batches: int = 5) -> float:
    """Wall time of one of many calls made back to back, in µs, the wait at their end included.

    The median of several batches.
    """
    one = batch_us(call, inputs, 1)
    calls = max(1, min(200, int(CALLING_US / one)))
    return percentiles([batch_us(call, inputs, calls) for _ in range(batches if calls > 1 else 2)])[1]


def batch_us(call: Callable[..., Tensor], inputs: Sequence[Inputs], calls: int) -> float:
    """Wall time of one of so many calls made back to back, in µs, the wait at their end included."""
    on_cuda = inputs[0][0].is_cuda
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for index in range(calls):
        call(*inputs[index % len(inputs)])
    if on_cuda:
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


def peak_mib(call: Callable[..., Tensor], inputs: Sequence[Inputs]) -> float:
    """Most memory in use during a call, in MiB, beyond what was in use before it. NaN on the CPU."""
    call(*inputs[0])  # compiles, and lets libraries allocate what they keep
    if not inputs[0][0].is_cuda:
        return float("nan")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(*inputs[0])
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
