"""Latent attention by the library: results against float64, and times in CUDA graphs over copies of the cache.

latent.py check; latent.py time SECONDS; latent.py one (two calls, for ncu). Run in the repository root; FA_CUDA_KERNEL
chooses the family.
"""
import math
import pathlib
import sys
import time
import traceback

if len(sys.argv) != (3 if sys.argv[1:2] == ["time"] else 2) or sys.argv[1] not in ("check", "time", "one"):
    sys.exit(__doc__)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import torch

import decode as D
import flashattn_ctypes as fa

library = fa.Library(pathlib.Path("build/libflashattn.so").resolve())


def make(batch, heads, keys, queries, page, dtype, lengths, copies, seed):
    """Calls and their results, over copies of the cache; rows after the lengths are NaN."""
    torch.manual_seed(seed)
    q = torch.randn(batch, queries, heads, 576, dtype=dtype, device="cuda")
    made = []
    for _ in range(copies):
        k = torch.randn(batch, keys, 1, 576, dtype=dtype, device="cuda")
        for b in range(batch):
            k[b, int(lengths[b]):] = math.nan
        options = {"seqlens_k": lengths, "device": fa.CUDA, "causal": True}
        paged = k
        if page:
            (paged,), table = D.in_pages(torch, [k], page)
            options.update(block_table=table, block_table_stride=table.shape[1])
        out = torch.full((batch, queries, heads, 512), math.nan, dtype=dtype, device="cuda")
        call = fa.Call(library, q, paged, paged[..., :512], out, decode=True, **options)
        size = call.workspace_size()
        if size:
            workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            call.kept.append(workspace)
            call.options.workspace, call.options.workspace_size = workspace.data_ptr(), size
        made.append((call, out, k))
    return q, made


def error_of(q, made, lengths, items):
    call, out, k = made[0]
    worst = 0.0
    for b in items:
        n, queries = int(lengths[b]), q.shape[1]
        keys = k[b, :n, 0].double()
        s = torch.einsum("qhd,nd->hqn", q[b].double(), keys) / math.sqrt(576)
        hidden = torch.ones(queries, n, dtype=torch.bool, device="cuda").triu(n - queries + 1)
        w = s.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
        want = torch.einsum("hqn,nd->qhd", w, keys[:, :512])
        got = out[b].double()
        error = float((got - want).norm() / want.norm()) if n else float(got.abs().max())
        worst = error if not error <= worst else worst
    return worst


def check():
    wrong = 0
    cases = [(3, 128, 1000, 1, 0), (3, 128, 1024, 1, 64), (3, 64, 1024, 2, 16), (3, 24, 1000, 4, 8),
             (2, 128, 8192, 1, 64), (5, 80, 640, 3, 128), (64, 128, 640, 1, 64), (1, 16, 128, 1, 32)]
    for number, (batch, heads, keys, queries, page) in enumerate(cases):
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(number)
            lengths = torch.randint(0, keys + 1, (batch,), dtype=torch.int32, device="cuda")
            lengths[0] = keys
            if batch > 2:
                lengths[1], lengths[2] = 0, 1
            try:
                q, made = make(batch, heads, keys, queries, page, dtype, lengths, 1, number)
                made[0][0]()
                torch.cuda.synchronize()
                first = made[0][1].clone()
                error = error_of(q, made, lengths, range(min(batch, 8)))
                made[0][1].fill_(math.nan)
                made[0][0]()
                torch.cuda.synchronize()
                same = bool((first.view(torch.int16) == made[0][1].view(torch.int16)).all())
            except Exception as fault:
                print("FAILED", number, dtype, str(fault)[:300], flush=True)
                wrong += 1
                if "CUDA" in str(fault):
                    return 1
                continue
            fine = same and error <= (4e-3 if dtype == torch.bfloat16 else 8e-4)
            wrong += not fine
            print(f"{'ok' if fine else 'WRONG'} b {batch} h {heads} s {keys} q {queries} page {page} "
                  f"{str(dtype)[6:]}: error {error:.2g}, second run {'same' if same else 'OTHER BITS'}", flush=True)
    print(made[0][0].describe())
    print("all right" if not wrong else f"{wrong} wrong")
    return wrong


def measure(batch, heads, keys, queries=1, page=64, rounds=5):
    kv_bytes = batch * keys * 576 * 2
    copies = max(1, min(16, math.ceil(2 * D.CACHE_BYTES / kv_bytes)))
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    q, made = make(batch, heads, keys, queries, page, torch.bfloat16, lengths, copies, 1)
    made[0][0]()
    torch.cuda.synchronize()
    error = error_of(q, made, lengths, {0, batch - 1})
    us = D.time_calls(torch, [m[0] for m in made], rounds)
    flops = 2 * batch * heads * queries * keys * (576 + 512)
    print(f"b {batch:3d} h {heads:3d} s {keys:5d} q {queries} page {page:3d}: {us:8.1f} us {kv_bytes / us / 1e3:6.0f} GB/s "
          f"{flops / us / 1e6:6.0f} TFLOP/s error {error:.2g} | {made[0][0].describe()[:90]}", flush=True)


def times(seconds):
    start = time.time()
    for cell in [(128, 128, 4096), (128, 128, 4096, 2), (32, 128, 4096), (1, 128, 8192), (32, 16, 8192), (128, 16, 8192),
                 (128, 64, 4096), (32, 128, 8192), (128, 128, 4096, 1, 0), (128, 128, 4096, 1, 16), (1, 16, 8192), (32, 32, 8192)]:
        if time.time() - start > seconds:
            print("time is over before", cell)
            break
        try:
            measure(*cell)
        except Exception:
            traceback.print_exc(limit=3)
        torch.cuda.empty_cache()


if sys.argv[1] == "check":
    sys.exit(check() != 0)
elif sys.argv[1] == "time":
    times(float(sys.argv[2]))
else:
    lengths = torch.full((128,), 4096, dtype=torch.int32, device="cuda")
    _, made = make(128, 128, 4096, 1, 64, torch.bfloat16, lengths, 1, 1)
    for _ in range(2):
        made[0][0]()
    torch.cuda.synchronize()
