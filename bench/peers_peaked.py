"""Exactness if few keys dominate a row: the cells of bench/peers.py that have draws, not times.

All queries of all heads are compared with float64. For each result the relative error (norm of the
difference over the norm) and the largest absolute one are averaged over the draws of the inputs,
for each library. The most exact peer is the one with the smallest relative error; ours is compared
with both errors of that peer. There is also a simulation of what the others do: weights rounded to
the type with the row's maximum as their base, and the sum of them before rounding. It takes the
place of the peer if there is none.

A forward cell compares `out`; a backward cell `dq`, `dk`, `dv`, computed from the library's own
result, and also `out` as the forward pass of training computes it (ours with a log-sum-exp).
"""

import dataclasses
import math
import statistics
import time
import zlib

import torch

from peers_exact import LSE_TOLERANCE, TOLERANCE, Inputs, exact, logits
from peers_libraries import as_torch, first_line
from peers_tables import ERROR_MARGIN, SIMULATION, is_own
from peers_timing import wait

KINDS = ("relative", "largest")

WIDEST_OF_OTHERS = 256  # no fast kernel of another library supports a larger head dim


class Compiling:
    """The time that compiling libraries may spend on compilation in a run. When it is over, only
    what has been compiled already is called."""

    def __init__(self, seconds):
        self.left, self.known = seconds, set()

    def key(self, backend, cell):
        return backend.name, cell.which, cell.dtype, cell.dim, cell.causal, tuple(cell.options)

    def refuses(self, backend, cell):
        return backend.compiles and self.left <= 0 and self.key(backend, cell) not in self.known

    def note(self, backend, cell, seconds):
        """Called after a call: the first one of a kind is the one that compiles."""
        key = self.key(backend, cell)
        if backend.compiles and key not in self.known:
            self.known.add(key)
            self.left -= seconds


# ---- Float64, and the simulation -----------------------------------------------------------------


def gathered(cell, of_head):
    """of_head(item, head) returns a tuple of tensors (n, ...): all heads', each as (batch, n,
    heads, ...)."""
    items = [[of_head(item, head) for head in range(cell.heads)] for item in range(cell.batch)]
    return [torch.stack([torch.stack([parts[i] for parts in heads], 1) for heads in items])
            for i in range(len(items[0][0]))]


def all_rows(cell, inputs):
    return torch.arange(cell.n_q, device=inputs.device)


def exact_results(cell, inputs):
    """The results in float64, by name; there are as many heads of keys as of queries."""
    def by_definition(of):
        rows = all_rows(of, inputs)
        return gathered(of, lambda item, head: exact(of, inputs, item, head, rows)[1])

    found = dict(zip(("out", "lse"), by_definition(dataclasses.replace(cell, which="forward"))))
    found["lse"] = found["lse"].transpose(1, 2)
    if cell.which == "backward":
        found |= zip(("dq", "dk", "dv"), by_definition(cell))
    return found


def simulated(cell, inputs):
    """The result with weights rounded to the type with the row's maximum as their base, divided by
    a float32 sum of them before rounding; everything else in float64."""
    def of_head(item, head):
        q, k, v = (x[item, :, head].double() for x in inputs.bshd)
        x = logits(cell, inputs, q, k, (item, head), all_rows(cell, inputs))
        p = (x - x.amax(1, keepdim=True)).exp().float()
        out = p.to(inputs.dtype).double() @ v / p.sum(1, keepdim=True).double()
        return (out.to(inputs.dtype),)

    return {"out": gathered(cell, of_head)[0]}


# ---- One cell ------------------------------------------------------------------------------------


def results_of(backend, cell, inputs):
    if cell.which == "forward":
        return {"out": as_torch(backend.function(cell, inputs)()[0])}
    found = dict(zip(("out", "lse"), backend.training_forward(cell, inputs)))
    found |= zip(("dq", "dk", "dv"), backend.function(cell, inputs)())
    return {name: as_torch(x) for name, x in found.items()}


def error_between(result, expected):
    difference = result.double() - expected
    both = torch.stack([difference.norm() / expected.norm(), difference.abs().max()]).tolist()
    return both if all(map(math.isfinite, both)) else [math.inf, math.inf]


def why_not(backend, cell, compiling):
    """Why a backend is not called; None: it is."""
    lacking = backend.lacks(cell)
    if lacking:
        return "no " + ", ".join(lacking)
    if is_own(backend.name):
        return None
    if cell.dim > WIDEST_OF_OTHERS:
        return f"head dim above {WIDEST_OF_OTHERS}"
    return "no time is left to compile" if compiling.refuses(backend, cell) else None


def attempt(backend, cell, inputs, expected, row, compiling):
    """Adds the errors in one draw to a backend's row."""
    try:
        with backend.context():
            if "kernel" not in row:  # a forced family may only have kernels for one pass
                forward = dataclasses.replace(cell, which="forward")
                row["kernel"] = backend.describe(forward, inputs)
                if cell.which == "backward":
                    row["gradient_kernel"] = backend.kernel_of(cell, inputs)
            begun = time.monotonic()
            results = results_of(backend, cell, inputs)
            compiling.note(backend, cell, time.monotonic() - begun)
            wait(backend, tuple(results.values()), inputs.device)
    except Exception as error:  # whatever another library raises only means that it cannot
        row |= {"state": "failed", "why": first_line(error)}
        return
    add(row, results, expected)


def add(row, results, expected):
    for name, result in results.items():
        row["draws"].setdefault(name, []).append(error_between(result, expected[name]))


def rounded(x):
    return float(f"{x:.5g}")


def finished(row, dtype):
    """A row with the means of its draws, and whether they are correct."""
    if row["state"] != "measured":
        return {key: value for key, value in row.items() if key != "draws"}
    row["error"], kept = {}, {}
    for name, pairs in row["draws"].items():
        kept[name] = {kind: list(map(rounded, x)) for kind, x in zip(KINDS, zip(*pairs))}
        row["error"][name] = {kind: rounded(statistics.fmean(x)) for kind, x in kept[name].items()}
    row["draws"] = kept
    wrong = [name for name, error in row["error"].items() if not is_right(name, error, dtype)]
    return row | ({"state": "wrong", "why": f"error of {', '.join(wrong)}"} if wrong else {})


def is_right(name, error, dtype):
    """dq and dk only need to be finite: if one weight is nearly 1, dP - D is far smaller than the
    error that rounding the result causes in D, and every library's relative error may be above 1.
    """
    if name == "lse":
        return error["largest"] <= LSE_TOLERANCE[dtype]
    return error["relative"] <= TOLERANCE[dtype] if name in ("out", "dv") else (
        math.isfinite(error["relative"]))


def seed_of(cell, args, draw):
    return zlib.crc32(f"{args.seed} {cell.name} {draw}".encode())


def run_cell(cell, backends, args, compiling):
    refusals = {b.name: why_not(b, cell, compiling) for b in backends}
    rows = {name: {"state": "cannot", "why": why} if why else {"state": "measured", "draws": {}}
            for name, why in refusals.items()}
    if cell.which == "forward":
        rows[SIMULATION] = {"state": "measured", "kernel": None, "draws": {}}
    for draw in range(cell.draws):
        generator = torch.Generator(args.device).manual_seed(seed_of(cell, args, draw))
        inputs = Inputs(cell, args.device, generator)
        expected = exact_results(cell, inputs)
        for backend in backends:
            if rows[backend.name]["state"] == "measured":
                attempt(backend, cell, inputs, expected, rows[backend.name], compiling)
        if SIMULATION in rows:
            add(rows[SIMULATION], simulated(cell, inputs), expected)
    rows = {name: finished(row, cell.dtype) for name, row in rows.items()}
    return {"name": cell.name, **vars(cell), "results": rows, "exactness": compared(rows)}


def ratio(ours, other):
    return rounded(ours / other) if other > 0 else 1.0 if ours == 0 else math.inf


def compared(rows):
    """{result: {"peer": the most exact one, each of ours: {kind: ours over the peer's}}}; a result
    that no other library has is left out."""
    found = {name: row["error"] for name, row in rows.items() if row["state"] == "measured"}
    peers = {name: error for name, error in found.items()
             if not is_own(name) and name != SIMULATION}
    if not peers and SIMULATION in found:
        peers = {SIMULATION: found[SIMULATION]}
    own = {name: error for name, error in found.items() if is_own(name)}
    exactness = {}
    for result in {result: None for error in peers.values() for result in error}:
        best = min((name for name in peers if result in peers[name]),
                   key=lambda name: peers[name][result]["relative"])
        exactness[result] = {"peer": best, **{
            name: {kind: ratio(error[result][kind], peers[best][result][kind]) for kind in KINDS}
            for name, error in own.items()}}
    return exactness


# ---- What the user sees --------------------------------------------------------------------------


def pair(error):
    return f"{error['relative']:.2e}/{error['largest']:.1e}"


def line_of(cell):
    """d128 full ...: out flashattn 1.7e-03/1.2e-02 (1.00/1.01), fa2 1.7e-03/1.2e-02, ..."""
    parts = []
    for result, exactness in cell["exactness"].items():
        errors = []
        for name, row in cell["results"].items():
            if result in row.get("error", {}):
                over = exactness.get(name)
                errors.append(f"{name} {pair(row['error'][result])}" + (
                    f" ({over['relative']:.2f}/{over['largest']:.2f})" if over else ""))
        parts.append(f"{result} {', '.join(errors)}")
    return f"{cell['name']}: " + "\n    ".join(parts)


def print_cell(cell, begun):
    print(f"[{time.monotonic() - begun:5.1f} s] {line_of(cell)}")
    for name, row in cell["results"].items():
        if row["state"] in ("failed", "wrong"):
            print(f"    {name} {row['state']}: {row['why']}")


def print_summary(cells):
    print("errors where few keys dominate rows, as multiples of the most exact peer's:")
    for name in dict.fromkeys(name for c in cells for name in c["results"] if is_own(name)):
        pairs = [(f"{c['name']} {result} {kind}", over[name][kind]) for c in cells
                 for result, over in c["exactness"].items() if name in over for kind in KINDS]
        above = sorted((p for p in pairs if not p[1] <= ERROR_MARGIN), key=lambda p: -p[1])
        if pairs:
            print(f"    {name}: above {ERROR_MARGIN:g} in {len(above)} of {len(pairs)}" + "".join(
                f"\n        {value:.2f} {what}" for what, value in above))
