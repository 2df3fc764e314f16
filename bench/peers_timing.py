"""How bench/peers.py times: samples of several calls one after another, in turns."""

import math
import time

import torch

SAMPLE_MS = {"cuda": 3.0, "cpu": 20.0}
MAX_CALLS = 400  # in a sample
SLOW_MS = 30.0  # a call this long hides the host's time: it needs no graph


def wait(backend, result, device):
    if backend.clock == "wall" and result is not None:
        backend.jax.block_until_ready(result)
    elif device == "cuda":
        torch.cuda.synchronize()


def in_turn(functions, calls):
    for _ in range(calls):
        for function in functions:
            result = function()
    return result


def captured(functions, calls):
    """A CUDA graph of the calls, so that the host's time does not count; and the objects that the
    graph uses, which must be kept with it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_turn(functions, calls)
    return graph.replay


class Timer:
    """Samples in ms per call. Several functions take turns, over buffers that do not fit in the
    cache together. `timed` tells how: in a graph, by calls, or by the clock. Slow functions are
    sampled less often, so that the samples together take about `budget` seconds at most."""

    def __init__(self, backend, functions, device, budget=math.inf):
        self.backend, self.functions, self.device = backend, functions, device
        self.events = device == "cuda" and backend.clock == "events"
        self.timed = "calls" if self.events else "clock"
        self.run = self.run_calls
        self.calls = 1
        for _ in range(3):
            once = self.sample()
            if 10 * once > budget * 1e3:
                break
        self.calls = self.calls_for(once)
        self.samples = []
        capturable = all(getattr(f, "capturable", True) for f in functions)
        if self.events and once < SLOW_MS and capturable:
            self.capture()
        self.most = max(1, budget * 1e3 / (once * self.calls * len(functions)))

    def calls_for(self, once):
        rounds = SAMPLE_MS[self.device] / max(once * len(self.functions), 1e-4)
        return max(1, min(MAX_CALLS, math.ceil(rounds)))

    def run_calls(self):
        return in_turn(self.functions, self.calls)

    def capture(self):
        """Captures a graph; and again if the first estimate was limited by the host's time."""
        try:
            self.record(self.calls)
            calls = self.calls_for(self.sample())
            if calls > 1.5 * self.calls:
                self.record(calls)
        except RuntimeError:
            torch.cuda.synchronize()
            self.run, self.timed = self.run_calls, "calls"

    def record(self, calls):
        self.calls, self.timed = calls, "graph"
        self.run = captured(self.functions, calls)
        self.sample()

    def sample(self):
        total = self.by_events() if self.events else self.by_clock()
        return total / self.calls / len(self.functions)

    def by_events(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def by_clock(self):
        begin = time.perf_counter()
        result = self.run()
        wait(self.backend, result, self.device)
        return (time.perf_counter() - begin) * 1e3

    def take(self):
        if len(self.samples) + 1 > self.most:
            return
        with self.backend.context():
            self.samples.append(self.sample())


class HostTimer(Timer):
    """The time of a call for the caller, who does not wait for the GPU."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.run, self.timed = self.run_calls, "host"
        self.calls = min(self.calls, 200)  # fewer than a stream can queue

    def sample(self):
        wait(self.backend, None, self.device)
        begin = time.perf_counter()
        result = self.run_calls()
        spent = (time.perf_counter() - begin) * 1e3
        wait(self.backend, result, self.device)
        return spent / self.calls / len(self.functions)


def take_turns(timers, rounds, after_round=lambda: None):
    """A B C, then C B A from another start: none is always first or always after the same one."""
    for n in range(rounds):
        order = timers[n % len(timers):] + timers[: n % len(timers)]
        for timer in order if n % 2 == 0 else reversed(order):
            timer.take()
        after_round()
