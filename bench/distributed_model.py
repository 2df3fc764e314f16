#!/usr/bin/env python3
"""A model of the time of flashattn.distributed.attention on many GPUs, from rates of links and kernels.

    bench/distributed_model.py                       # the tables of docs/distributed.md
    bench/distributed_model.py --write               # writes them there; --check: compares them
    bench/distributed_model.py --ranks 64 --n 1048576 --network 45e9 --heads 64 --heads-kv 8

The kernels' rates are those that bench/peers.py measured on one H200. Rates and latencies of links are
assumptions, and the host's times are fitted to two H200s at n = 8k (Machine). bench/distributed.py
measures the host's time of each method in its own run. docs/distributed.md compares the model with
measurements.

The model. A ring of R ranks has R steps. In each step a rank computes a block while the next one is
sent. If c is the time of a step's kernels and m that of its messages, a pass takes
(R - 1) max(c, m) + c. Ulysses has G groups of heads as its steps. If c and m are the times of a group,
and p is the time of all copies around messages, a pass takes m + (G - 1) max(c, m) + c + p: the first
group's inputs and the last one's results are not hidden, and copies never are. All-gather first
exchanges and then computes, and so do Ulysses and the ring of a mesh: nothing is hidden between these.
The layout is zigzag, so all steps have the same work. A causal rank receives half of a block from the
ranks before it and all of it from those after it; the first rank, for which all others wait, receives
whole blocks. If a group spans several nodes, each step has ranks that send over the network, so the
network's rate counts. The host runs ahead of its GPU: a pass takes at least the host's time for its
operators, batches of messages and calls.
"""

import argparse
import importlib.util
import json
import pathlib
import re
import sys
from typing import NamedTuple, Optional

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "distributed.md"
TABLE = re.compile(r"(<!-- model: (\w+) -->\n)(.*?)(<!-- end of model -->)", re.S)


class Machine(NamedTuple):
    """Rates in bytes or operations per second, times in seconds."""

    forward: float  # of the kernels, head dim 128
    backward: float
    memory: float  # bytes read and written
    node: int = 8  # GPUs that NVLink connects
    nvlink: float = 0.8 * 450e9  # of a GPU in one direction; 80% of the data sheet
    network: float = 0.9 * 50e9  # 400 Gb/s a GPU
    nvlink_latency: float = 10e-6  # of a batch of messages
    network_latency: float = 25e-6
    launch: float = 15e-6  # of a step's kernels
    host_operator: float = 0.22e-3  # of the host (PyTorch without graphs): an operator of autograd,
    host_batch: float = 0.30e-3  # a batch of messages between two ranks,
    host_peer: float = 0.1e-3  # each further rank in it (assumed),
    host_forward: float = 0.33e-3  # the forward of a block,
    host_backward: float = 0.85e-3  # and its backward
    host_passes: Optional[tuple[float, float]] = None  # of forward and backward, if they were measured


RESULTS = ROOT / "bench" / "results"


def with_rates_of(machine, p, forward, training):
    """With the rates that one GPU reaches with the whole problem: seconds of forward, and of both
    passes."""
    return machine._replace(forward=operations(p, False) / forward, backward=operations(p, True) / (training - forward))


def measured_machine(gpu="h200", **changes):
    """With the measured rates of one GPU of that name (bench/results), if there are any; otherwise
    of an H200."""
    if not all((RESULTS / f"peers-{gpu}{part}.json").exists() for part in ("", "-backward")):
        gpu = "h200"
    rates = {}
    for name, file, cell in (
        ("forward", f"peers-{gpu}.json", "d128 full n16k"),
        ("backward", f"peers-{gpu}-backward.json", "backward d128 full n16k"),
    ):
        result = json.loads((RESULTS / file).read_text())
        (found,) = [c for c in result["cells"] if c["name"] == cell]
        rates[name] = found["results"]["flashattn"]["tflops"] * 1e12
        rates["memory"] = result["ceiling"]["copy_gb_s"] * 1e9
    return Machine(**{**rates, **changes})


class Problem(NamedTuple):
    n: int
    heads: int = 32
    heads_kv: int = 8
    dim: int = 128
    causal: bool = True
    batch: int = 1


class Pass(NamedTuple):
    """For the slowest rank. compute, communicate: each alone; sent: bytes of a rank, on average."""

    total: float
    compute: float
    communicate: float
    sent: float

    def __add__(self, other):
        return Pass(*(a + b for a, b in zip(self, other)))


HALF, FLOAT = 2, 4  # bytes


def operations(p, backward):
    """Of the whole problem: two products forward, five backward."""
    return (10 if backward else 4) * p.batch * p.n**2 * p.heads * p.dim / (2 if p.causal else 1)


def rate(p, m, backward):
    return m.backward if backward else m.forward


def one_gpu(p, m, backward):
    return operations(p, backward) / rate(p, m, backward) + m.launch


def link(m, ranks, inside=False):
    """(rate, latency): inside a node, or between nodes if the group is larger."""
    if inside or ranks <= m.node:
        return m.nvlink, m.nvlink_latency
    return m.network, m.network_latency


def host_time(m, backward, operators, batches, blocks):
    """batches: for each, the number of ranks with which a rank exchanges messages."""
    if m.host_passes:
        return m.host_passes[backward]
    block = m.host_backward if backward else m.host_forward
    messages = sum(m.host_batch + (peers - 1) * m.host_peer for peers in batches)
    return operators * m.host_operator + messages + blocks * block


def at_least(found, seconds):
    return found._replace(total=max(found.total, seconds))


def merge_time(p, m, rows, columns, backward):
    """Sums in float32 are read and written once for each block, and its result is read."""
    elements = p.batch * rows * p.heads / columns * p.dim
    if backward:  # dq, and dk and dv of the block
        elements += 2 * p.batch * rows * p.heads_kv / columns * p.dim
    return elements * (2 * FLOAT + HALF) / m.memory


def exchanged(p, ranks, rows):
    """Bytes of Ulysses' all-to-alls of a pass, (all, sent): q, k, v and out, or the gradients of these."""
    elements = p.batch * rows * (2 * p.heads + 2 * p.heads_kv) * p.dim
    return elements * HALF, elements * (ranks - 1) / ranks * HALF


def copies_of_exchange(p, m, ranks, rows):
    """What is sent is copied before, and all of it is reordered afterwards."""
    return 2 * sum(exchanged(p, ranks, rows)) / m.memory


def exchange(p, m, ranks, rows):
    """With its copies."""
    speed, latency = link(m, ranks)
    _, sent = exchanged(p, ranks, rows)
    return Pass(0, 0, sent / speed + copies_of_exchange(p, m, ranks, rows) + 2 * latency, sent)


def block_bytes(p, rows, columns):
    """k and v of a block, in 16 bits."""
    return 2 * p.batch * rows * p.heads_kv / columns * p.dim * HALF


def ring(p, m, ranks, columns=1, backward=False):
    """columns: ranks inside a node that exchange heads; the ring then has ranks / columns."""
    steps = ranks // columns
    if p.heads_kv % columns or p.heads % columns or ranks % columns:
        return None
    rows = p.n / steps
    work = operations(p, backward) / ranks / steps / rate(p, m, backward)
    c = work + m.launch + merge_time(p, m, rows, columns, backward)
    blocks = block_bytes(p, rows, columns)
    gradients = blocks if backward else 0  # a block takes one call, whose gradients have 16 bits
    speed, latency = link(m, ranks)
    message = (blocks + gradients) / speed + latency
    received = (0.75 if p.causal else 1) * (blocks + gradients)
    communicate = (steps - 1) * message
    total = (steps - 1) * max(c, message) + c
    if backward and steps > 1:  # the last block's gradients
        total += gradients / speed
    whole = Pass(total, steps * c, communicate, (steps - 1) * received)
    batches = [1] * ((steps - 1) * (2 if backward else 1))
    if columns == 1:
        return at_least(whole, host_time(m, backward, 1, batches, steps))
    heads = exchange(p, m, columns, p.n / ranks)
    whole += heads._replace(total=heads.communicate)
    return at_least(whole, host_time(m, backward, 3, batches + [columns - 1] * 2, steps))


def all_gather(p, m, ranks, backward=False):
    rows = p.n / ranks
    work = operations(p, backward) / ranks / rate(p, m, backward)
    compute = work + 2 * m.launch + merge_time(p, m, rows, 1, backward)
    speed, latency = link(m, ranks)
    one_way = block_bytes(p, rows, 1)
    blocks = one_way * (1 + (FLOAT / HALF if backward else 0))
    # Received rows are reordered; gradients are converted to float32 first.
    copies = 2 * HALF + (HALF + FLOAT + 2 * FLOAT if backward else 0)
    copied = ranks * one_way / HALF * copies if ranks > 1 else 0
    communicate = (ranks - 1) * blocks / speed + copied / m.memory + 2 * latency
    sent = (0.75 if p.causal else 1) * (ranks - 1) * blocks
    whole = Pass(compute + communicate, compute, communicate, sent)
    return at_least(whole, host_time(m, backward, 1, [ranks - 1] * (2 if backward else 1), 2))


def load_plan():
    """Loads flashattn._distributed_plan alone, so that the package need not be built."""
    path = ROOT / "python" / "flashattn" / "_distributed_plan.py"
    spec = importlib.util.spec_from_file_location("distributed_plan", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plan = load_plan()


def head_groups(p, ranks):
    """As many as attention chooses."""
    heads = plan.Heads(p.batch, p.heads, p.heads_kv, p.dim, p.dim)
    mask = plan.Mask(p.causal, -1, -1, None, False, False)
    return plan.head_groups(heads, plan.Lengths((0, p.n), (0, p.n), False), mask, ranks)


def ulysses(p, m, ranks, backward=False, groups=None):
    if p.heads_kv % ranks or p.heads % ranks:
        return None
    groups = groups or head_groups(p, ranks)
    work = operations(p, backward) / ranks / rate(p, m, backward) + groups * m.launch
    heads, copies = exchange(p, m, ranks, p.n / ranks), copies_of_exchange(p, m, ranks, p.n / ranks)
    c, message = work / groups, (heads.communicate - copies) / groups
    total = message + (groups - 1) * max(c, message) + c + copies
    whole = heads._replace(total=total, compute=work)
    # Inputs of the first group, of each later one (with results of the group two before it), the
    # last two results.
    batches = 2 if groups == 1 else groups + 2
    return at_least(whole, host_time(m, backward, 1, [ranks - 1] * batches, groups))


def mesh(p, m, ranks, backward=False):
    """Ulysses inside a node, the ring across nodes."""
    if ranks <= m.node:
        return None
    return ring(p, m, ranks, m.node, backward)


METHODS = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses, "mesh": mesh}


def training(method, p, m, ranks) -> Optional[Pass]:
    """Forward and backward."""
    forward = METHODS[method](p, m, ranks, backward=False)
    return forward and forward + METHODS[method](p, m, ranks, backward=True)


def efficiency(p, m, ranks, method):
    """The time of one GPU, divided among the ranks, by the time of the method."""
    found = training(method, p, m, ranks)
    if found is None:
        return None
    return (one_gpu(p, m, False) + one_gpu(p, m, True)) / ranks / found.total


def ring_length(m, ranks, inside):
    """Ranks in the ring: all, or one of each node."""
    return ranks // m.node if inside else ranks


def hidden_from(p, m, ranks, inside, backward):
    """The least power of two n from which the products of a block take longer than its bytes.
    Constant costs of each step (latency, launches, merging) do not count. inside: whether nodes
    exchange heads."""
    steps = ring_length(m, ranks, inside)
    if steps < 2:
        return None
    columns = ranks // steps
    speed, _ = link(m, ranks)
    n = ranks
    while True:
        work = operations(p._replace(n=n), backward) / ranks / steps / rate(p, m, backward)
        sent = block_bytes(p, n / steps, columns) * (2 if backward else 1)
        if work >= sent / speed:
            return n
        n *= 2


def efficient_from(p, m, ranks, inside, share=0.9):
    """The least power of two n with which forward and backward reach a share of the ranks' speed.
    """
    method = "mesh" if inside else "ring"
    n = ranks
    while n < 1 << 40:
        found = efficiency(p._replace(n=n), m, ranks, method)
        if found is None:
            return None
        if found >= share:
            return n
        n *= 2
    return None


# ---- Tables -------------------------------------------------------------------------------------

RANKS = (8, 16, 64, 256, 1024)
LENGTHS = (32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20)


def thousands(n):
    if n is None:
        return "–"
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1024 else str(n)


def hiding_table(p, m):
    yield "| GPUs | ring: forward | backward | 90% of all GPUs | mesh: forward | backward | 90% of all GPUs |"
    yield "|---|---|---|---|---|---|---|"
    for ranks in RANKS:
        cells = []
        for inside in (False, True):
            cells += [hidden_from(p, m, ranks, inside, b) for b in (False, True)]
            cells.append(efficient_from(p, m, ranks, inside))
        yield f"| {ranks} | " + " | ".join(map(thousands, cells)) + " |"


def best_table(p, m):
    """The method with the shortest forward and backward, and its efficiency."""
    yield "| GPUs | " + " | ".join(f"n = {thousands(n)}" for n in LENGTHS) + " |"
    yield "|---|" + "---|" * len(LENGTHS)
    for ranks in RANKS:
        cells = []
        for n in LENGTHS:
            found = {x: efficiency(p._replace(n=n), m, ranks, x) for x in METHODS}
            found = {x: e for x, e in found.items() if e is not None}
            best = max(found, key=found.get)
            cells.append(f"{best} {found[best]:.0%}")
        yield f"| {ranks} | " + " | ".join(cells) + " |"


def methods_table(p, m):
    """All methods at one length."""
    yield "| GPUs | " + " | ".join(METHODS) + " |"
    yield "|---|" + "---|" * len(METHODS)
    for ranks in RANKS:
        found = [efficiency(p, m, ranks, x) for x in METHODS]
        cells = ["–" if e is None else f"{e:.0%}" for e in found]
        yield f"| {ranks} | " + " | ".join(cells) + " |"


def tables(m):
    p = Problem(1 << 20)
    return {
        "hiding": hiding_table(p, m),
        "best": best_table(p, m),
        "methods": methods_table(p, m),
    }


def rewritten(text, m):
    """A document with its current tables."""
    made = {name: "\n".join(lines) + "\n" for name, lines in tables(m).items()}
    return TABLE.sub(lambda match: match[1] + made[match[2]] + match[4], text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="the tables into docs/distributed.md")
    parser.add_argument("--check", action="store_true", help="exit code 1 if they differ there")
    parser.add_argument("--ranks", type=int, help="one configuration instead of tables")
    parser.add_argument("--n", type=int, default=1 << 20)
    for name in ("heads", "heads_kv", "dim"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=Problem._field_defaults[name])
    numbers = {name: type_ for name, type_ in Machine.__annotations__.items() if name != "host_passes"}
    for name, type_ in numbers.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type_)
    args = parser.parse_args()
    changes = {x: getattr(args, x) for x in numbers if getattr(args, x) is not None}
    m = measured_machine(**changes)
    if args.write or args.check:
        text = DOCUMENT.read_text()
        new = rewritten(text, m)
        if args.write:
            DOCUMENT.write_text(new)
        elif new != text:
            print("docs/distributed.md: a table differs; run bench/distributed_model.py --write", file=sys.stderr)
            return 1
        return 0
    if args.ranks:
        p = Problem(args.n, args.heads, args.heads_kv, args.dim)
        for name in METHODS:
            found = training(name, p, m, args.ranks)
            if found is not None:
                share = efficiency(p, m, args.ranks, name)
                print(
                    f"{name:10} {found.total * 1e3:10.2f} ms ({share:.0%} of {args.ranks} GPUs), kernels "
                    f"{found.compute * 1e3:.2f} ms, messages {found.communicate * 1e3:.2f} ms, "
                    f"{found.sent / 1e6:.1f} MB sent by a rank"
                )
        return 0
    for name, lines in tables(m).items():
        print(f"{name}:", *lines, sep="\n", end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
