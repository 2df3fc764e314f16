#!/usr/bin/env python3
"""One causal sequence over several GPUs: flashattn.distributed and other implementations, in one run.

    torchrun --nproc-per-node 2 bench/distributed.py [--lengths 8192,131072] [--heads 32] [--heads-kv 32]
        [--dim 128] [--rounds 5] [--budget S] [--peers NAME,...] [--package FOLDER] [--out FILE]

    flashattn-ring, flashattn-all_gather, flashattn-ulysses  the package, layout zigzag
    torch-all-gather, torch-all-to-all  torch.distributed.tensor.experimental.context_parallel
    ring-flash-attn  zigzag_ring_flash_attn_func of ring_flash_attn, with flash_attn's kernels or, if
                     flash_attn is not installed, with ours through flashattn.drop_in

Also "one": flashattn.attention of the whole sequence on each GPU by itself. Results are compared with
its results, and its time divided by the number of ranks is 100%. Each round times all peers one after
another; a figure is the median over the rounds of the slowest rank's time. Forward is timed without
gradients; training is forward and backward. A peer whose output or gradients are wrong has no figure,
and the reason for a missing peer is the first line of its error. On CUDA the backend is NCCL and the
type bfloat16; on the CPU Gloo and float32, for testing the script. First the package's methods run on
few rows, so that the GPU waits for the host: these runs give the cost model the host's time of a pass.
Rank 0 prints, and writes bench/results/distributed-<device>-<ranks>.json, or the file that --out names;
on the CPU only with --out.
Exit codes: 0 fine, 1 flashattn failed or was wrong, 2 it could not be run.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.util
import os
import pathlib
import re
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import distributed_model  # noqa: E402
from peers import Stop, device_of, names, positive, versions, write  # noqa: E402
from peers_libraries import first_line  # noqa: E402
from source_hash import ROOT, cuda_hash  # noqa: E402

ONE = "one"
SEED = 1
HOST_ROWS = 64  # of a rank: the GPU has next to nothing to do
HOST_BUDGET = 3.0  # seconds for measuring the host's time


# ---- The peers -----------------------------------------------------------------------------------
#
# A peer is a context: given the whole q, k, v and dout of every rank it yields (attend, q, k, v, dout), all of
# this rank's rows, in the order (batch, rows, heads, dim). Rows are those of layout zigzag.


def rows_of(x):
    """This rank's two chunks; independent of the package, and the same for all peers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(2 * ranks, 1)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), 1)


def leaves(q, k, v):
    return [x.detach().clone().requires_grad_() for x in (q, k, v)]


@contextlib.contextmanager
def alone(q, k, v, dout):
    attention = importlib.import_module("flashattn").attention
    yield lambda q, k, v: attention(q, k, v, causal=True), *leaves(q, k, v), dout


def of_package(method):
    @contextlib.contextmanager
    def peer(q, k, v, dout):
        attention = importlib.import_module("flashattn.distributed").attention
        # Lengths are known here, as in a training loop: nothing waits for the device.
        lengths = [q.shape[1] // dist.get_world_size()] * dist.get_world_size()
        named = {"method": method, "layout": "zigzag", "lengths": lengths, "causal": True}
        own = leaves(*(rows_of(x) for x in (q, k, v)))
        yield lambda q, k, v: attention(q, k, v, **named), *own, rows_of(dout)

    return peer


def of_torch(rotate):
    @contextlib.contextmanager
    def peer(q, k, v, dout):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        mesh = init_device_mesh(q.device.type, (dist.get_world_size(),))
        set_rotate_method(rotate)
        buffers = [x.transpose(1, 2).contiguous() for x in (q, k, v, dout)]
        named = {"buffers": buffers, "buffer_seq_dims": [2] * 4, "no_restore_buffers": set(buffers)}
        with context_parallel(mesh, **named):
            for x in buffers[:3]:
                x.requires_grad_()

            def attend(q, k, v):
                gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)

            yield attend, *buffers

    peer.heads_first = True
    return peer


@contextlib.contextmanager
def of_ring_flash_attn(q, k, v, dout):
    # Also if the installed flash_attn only has FlashAttention 4.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("flash_attn.flash_attn_interface")
    if "flash_attn.flash_attn_interface" not in sys.modules:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]
        importlib.import_module("flashattn.drop_in")
    # Its adapter for models, which is not used here, imports a name that Transformers no longer has.
    transformers = importlib.import_module("transformers.modeling_flash_attention_utils")
    if not hasattr(transformers, "is_flash_attn_greater_or_equal_2_10"):
        transformers.is_flash_attn_greater_or_equal_2_10 = True
    attention = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    group = dist.group.WORLD
    own = leaves(*(rows_of(x) for x in (q, k, v)))
    yield lambda q, k, v: attention(q, k, v, causal=True, group=group), *own, rows_of(dout)


PEERS = {
    "flashattn-ring": of_package("ring"),
    "flashattn-all_gather": of_package("all_gather"),
    "flashattn-ulysses": of_package("ulysses"),
    "torch-all-gather": of_torch("allgather"),
    "torch-all-to-all": of_torch("alltoall"),
    "ring-flash-attn": of_ring_flash_attn,
}


# ---- One length ----------------------------------------------------------------------------------


def inputs(n, args):
    """The same on all ranks."""
    generator = torch.Generator(args.device).manual_seed(SEED)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32

    def random(heads):
        x = torch.randn(1, n, heads, args.dim, device=args.device, dtype=dtype, generator=generator)
        return x

    return random(args.heads), random(args.heads_kv), random(args.heads_kv), random(args.heads)


def synchronize(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def free_memory(args):
    """For other libraries; resets the peak to the memory in use."""
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train(attend, q, k, v, dout):
    out = attend(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def infer(attend, q, k, v, dout):
    with torch.no_grad():
        return attend(q, k, v)


def agree(fine, args):
    """Whether all ranks agree."""
    flag = torch.tensor(int(fine), device=args.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def largest(value, args):
    x = torch.tensor(value, dtype=torch.float64, device=args.device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def error_of(results, expected, heads_first):
    """The largest of the relative errors of the output and the gradients. expected: rows of this
    rank."""
    errors = []
    for x, y in zip(results, expected):
        x, y = x.transpose(1, 2) if heads_first else x, y.float()
        errors.append(((x.float() - y).norm() / y.norm()).item())
    return max(errors) if all(e == e for e in errors) else float("inf")


def check(name, given, expected, args):
    """{"error": ...}, or {"failed": reason}; the same kind on all ranks."""
    peer, why, error = PEERS[name], None, float("inf")
    try:
        with peer(*given) as work:
            error = error_of(train(*work), expected, getattr(peer, "heads_first", False))
    except Exception as failure:
        why = first_line(failure)
    if not agree(why is None, args):
        return {"failed": why or "another rank failed"}
    error = largest(error, args)
    bound = 2e-2 if args.device == "cuda" else 1e-4
    return {"error": error} if error <= bound else {"failed": f"wrong: relative error {error:.1e}"}


def timed(function, work, calls, args):
    """Seconds of a call on the slowest rank."""
    function(*work)
    synchronize(args)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        function(*work)
    synchronize(args)
    return largest((time.perf_counter() - begin) / calls, args)


def measure(n, args):
    given = inputs(n, args)
    with alone(*given) as work:
        begin = time.perf_counter()
        expected = [rows_of(x) for x in train(*work)]
        synchronize(args)
        seconds = largest(time.perf_counter() - begin, args)
    del work
    free_memory(args)
    results = {name: check(name, given, expected, args) for name in args.peers}
    del expected
    running = [ONE, *(name for name, r in results.items() if "error" in r)]
    results[ONE] = {"error": 0.0}
    calls = max(1, int(args.budget / max(seconds, 1e-6) / args.rounds / 2 / len(running)))
    samples = {name: {"forward": [], "training": []} for name in running}
    for _ in range(args.rounds):
        for name in running:
            peer = alone if name == ONE else PEERS[name]
            free_memory(args)
            with peer(*given) as work:
                samples[name]["forward"].append(timed(infer, work, calls, args))
                samples[name]["training"].append(timed(train, work, calls, args))
            del work
            if args.device == "cuda":
                results[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
    for name in running:
        for part, seconds in samples[name].items():
            results[name][part + "_ms"] = statistics.median(seconds) * 1e3
            results[name][part + "_samples_ms"] = [s * 1e3 for s in seconds]
    return {"n": n, "results": finish(n, results, running, args)}


def measure_host(args):
    """{peer: seconds of its forward and of its backward}: the host's time for a call of the
    package."""
    chosen = [name for name in args.peers if name.startswith("flashattn-")]
    if not chosen:
        return {}
    few = argparse.Namespace(**{**vars(args), "peers": chosen, "host": {}, "budget": HOST_BUDGET})
    results = measure(HOST_ROWS * dist.get_world_size(), few)["results"]
    found = {}
    for name in chosen:
        if "failed" not in results[name]:
            forward, training = (results[name][part + "_ms"] / 1e3 for part in ("forward", "training"))
            found[name] = (forward, training - forward)
    return found


def finish(n, results, running, args):
    """Adds shares of what the ranks could do, and of the model's figures."""
    ranks = dist.get_world_size()
    for name in running:
        for part in ("forward", "training"):
            ideal = results[ONE][part + "_ms"] / ranks
            results[name][part + "_share"] = ideal / results[name][part + "_ms"]
    if args.device == "cuda":
        problem = distributed_model.Problem(n, args.heads, args.heads_kv, args.dim)
        seconds = [results[ONE][part + "_ms"] / 1e3 for part in ("forward", "training")]
        machine = distributed_model.with_rates_of(
            distributed_model.measured_machine(gpu_of(device_of(args))), problem, *seconds)
        for name, result in results.items():
            method = name.removeprefix("flashattn-")
            if method != name and method in distributed_model.METHODS:
                with_host = machine._replace(host_passes=args.host.get(name))
                result["model_share"] = distributed_model.efficiency(problem, with_host, ranks, method)
    return results


# ---- What the user sees --------------------------------------------------------------------------


def print_length(cell):
    print(f"== n {cell['n']}")
    for name, r in sorted(cell["results"].items(), key=lambda x: x[1].get("training_ms", 1e30)):
        if "failed" in r:
            print(f"{name:22} -  {r['failed']}")
            continue
        model = r.get("model_share")
        print(
            f"{name:22} forward {r['forward_ms']:10.3f} ms {r['forward_share']:6.1%}   forward and "
            f"backward {r['training_ms']:10.3f} ms {r['training_share']:6.1%}   error {r['error']:.1e}"
            + (f"   model {model:.1%}" if model else "")
        )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="More is said at the top of the file.")
    add = parser.add_argument
    add("--lengths", default="8192,32768,131072,524288", metavar="N,...", help="of the whole sequence")
    add("--heads", type=positive, default=32)
    add("--heads-kv", type=positive, help="default: heads")
    add("--dim", type=positive, default=128)
    add("--rounds", type=positive, default=5)
    add("--budget", type=float, default=60.0, metavar="S", help="seconds for a length, roughly")
    add("--peers", type=names(list(PEERS)), default=list(PEERS), metavar="NAME,...")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch finds it, else cpu")
    add("--package", type=pathlib.Path, metavar="FOLDER", help="to import flashattn from")
    add("--timeout", type=float, default=300.0, metavar="S", help="of the process group")
    add("--out", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    args.heads_kv = args.heads_kv or args.heads
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.lengths = [positive(x) for x in args.lengths.split(",")]
    return args


def gpu_of(machine):
    """The name in result files."""
    found = re.search(r"[A-Za-z]+\d+\w*", machine["device"])
    return found[0].lower() if found else "gpu"


def target_of(args, machine):
    if args.out or args.device == "cpu":
        return args.out
    return ROOT / "bench" / "results" / f"distributed-{gpu_of(machine)}-{dist.get_world_size()}.json"


def start(args):
    if "RANK" not in os.environ:
        raise Stop("run it by torchrun: torchrun --nproc-per-node 2 bench/distributed.py")
    if args.package:
        sys.path.insert(0, str(args.package))
    importlib.import_module("flashattn.distributed")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=args.timeout))
    for n in args.lengths:
        if n % (2 * dist.get_world_size()):
            raise Stop(f"--lengths has {n}: expected multiples of {2 * dist.get_world_size()}, twice the ranks")


def run(args):
    start(args)
    fixed = {"machine": device_of(args), "ranks": dist.get_world_size(), "versions": versions(),
             "cuda_sha256": cuda_hash(), "date": datetime.date.today().isoformat(), "seed": SEED,
             "heads": args.heads, "heads_kv": args.heads_kv, "dim": args.dim}
    args.host = measure_host(args)
    fixed["host_seconds"] = args.host
    target, cells = target_of(args, fixed["machine"]), []
    for n in args.lengths:
        cells.append(measure(n, args))
        if dist.get_rank() == 0:
            print_length(cells[-1])
            if target:
                write(target, {**fixed, "cells": cells})
    ours = [r for cell in cells for name, r in cell["results"].items() if name.startswith("flashattn")]
    return 1 if any("failed" in r for r in ours) else 0


def main():
    args = arguments()
    try:
        return run(args)
    except (Stop, ImportError) as why:
        print(f"distributed.py: {first_line(why)}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
