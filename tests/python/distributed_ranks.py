"""Processes for test_distributed.py: ranks of Gloo that stay and run one function after another,
and the functions that they run. Arrays go to and fro as NumPy's.

FA_TEST_NCCL=N: N ranks of NCCL in their place, a GPU each. Tests that need more ranks are skipped.
"""

import contextlib
import datetime
import multiprocessing
import os
import time
import unittest.mock

import pytest

GPUS = int(os.environ.get("FA_TEST_NCCL", 0))
DEVICE = "cuda" if GPUS else "cpu"
RANKS = GPUS or 8
SIZES = (1, 2, 3, 4, 8)
MESHES = ((2, 2), (1, 2), (2, 1), (2, 4), (4, 2))
MEETING = datetime.timedelta(seconds=60)
PATIENCE = 5.0  # seconds: the timeout of the groups with a failing rank
FAILING = ("ring", "ulysses")  # methods in which one does


class Failed(Exception):
    """An error in a rank, with the name of its type."""

    def __init__(self, kind, text, seconds):
        super().__init__(kind, text, seconds)
        self.kind, self.text, self.seconds = kind, text, seconds


class Ranks:
    """Processes that wait for work. Only the first one's imports take time: the others are forked
    from the same server."""

    def __init__(self, count=RANKS):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "flashattn.distributed"])
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, count), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        port = self.pipes[0].recv()
        for pipe in self.pipes[1:]:
            pipe.send(port)
        for pipe in self.pipes:
            assert pipe.recv() == "ready"

    def run(self, function, size, *arguments, **named):
        """Runs function(size, ...) on the first ranks; returns a list of results, or of Failed."""
        if size > len(self.pipes):
            pytest.skip(f"needs {size} ranks")
        for pipe in self.pipes[:size]:
            pipe.send((function.__name__, size, arguments, named))
        results = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(120):
                raise TimeoutError(f"rank {rank} of {size} is still at {function.__name__}")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(Failed("EOFError", "the rank has ended", 0.0))
        return results

    def values(self, function, size, *arguments, **named):
        """The same if no rank may fail."""
        results = self.run(function, size, *arguments, **named)
        for result in results:
            if isinstance(result, Failed):
                raise result
        return results

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


_groups = {}


def _meet(pipe, rank, count, dist):
    """The store by which the ranks meet. The first one listens at a port that the system chooses:
    one that was free a moment ago may have been taken since."""
    if rank > 0:
        return dist.TCPStore("127.0.0.1", pipe.recv(), count, False, MEETING)
    store = dist.TCPStore("127.0.0.1", 0, count, True, MEETING, wait_for_workers=False)
    pipe.send(store.port)
    return store


def _serve(pipe, rank, count):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    if GPUS:
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    dist.init_process_group(
        "nccl" if GPUS else "gloo",
        store=_meet(pipe, rank, count, dist),
        rank=rank,
        world_size=count,
        timeout=MEETING,
    )
    short = datetime.timedelta(seconds=PATIENCE)
    for size in SIZES:
        if size <= count:
            _groups[size] = dist.new_group(list(range(size)))
    failing = [(3, when + method) for when in ("forward", "backward") for method in FAILING]
    for size, name in ((3, "before"), *failing, (2, "usable"), (3, "usable"), (count, "dead")):
        if size <= count:
            dist.barrier()  # ranks connect within the same timeout, so they must begin together
            _groups[size, name] = dist.new_group(list(range(size)), timeout=short)
    for shape in MESHES:
        size = shape[0] * shape[1]
        if size <= count:
            _groups[shape] = DeviceMesh(DEVICE, torch.arange(size, device="cpu").view(shape))
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        name, size, arguments, named = work
        start = time.monotonic()
        try:
            result = globals()[name](size, *arguments, **named)
        except Exception as error:
            result = Failed(type(error).__name__, str(error), time.monotonic() - start)
        pipe.send(result)


# ---- What ranks run -----------------------------------------------------------------------------


def _group(size, mesh=None):
    return _groups[size if mesh is None else mesh]


def _tensor(x, dtype, gradient=False):
    import torch

    if x is None:
        return None
    x = torch.from_numpy(x).to(DEVICE)
    if x.is_floating_point():
        x = x.to(dtype)
    return x.clone().requires_grad_(gradient)


def _in_groups(count):
    """A context in which Ulysses works on this many groups of heads; None: on as many as by
    default."""
    from flashattn import _distributed_plan

    if count is None:
        return contextlib.nullcontext()
    return unittest.mock.patch.object(_distributed_plan, "head_groups", lambda *_: count)


def attend_in_groups(size, case, groups):
    with _in_groups(groups):
        return attend(size, case)


def attend_apart(size, case):
    """Keys and values in separate messages."""
    from flashattn import _distributed_ops

    with unittest.mock.patch.object(_distributed_ops, "_SMALL", 0):
        return attend(size, case)


def attend_rounded(size, case):
    """The results of calls have the inputs' type before they are merged or summed, as on CUDA."""
    from flashattn import _distributed_ops

    with unittest.mock.patch.object(_distributed_ops, "_partial_dtype", lambda x: x.dtype):
        return attend(size, case)


def attend(size, case, mesh=None):
    """Shards a case, runs it forward and backward, and combines the results: out, lse and gradients
    of the whole problem, on rank 0; and the own part of gradients of shared tensors."""
    import numpy as np
    import torch

    from flashattn import distributed

    group = _group(size, mesh)
    dtype = getattr(torch, case["dtype"])
    places = {"group": group, "layout": case["layout"]}
    lengths = {"q": case["lengths"], "k": case["lengths_k"]}

    def cut(x, side, axis=1):
        x = distributed.shard(x, axis=axis, lengths=lengths[side], **places)
        return x.contiguous()

    def mine(name, side):
        return cut(_tensor(case[name], dtype), side).clone().requires_grad_()

    q, k, v = mine("q", "q"), mine("k", "k"), mine("v", "k")
    options = dict(case["options"])
    whole = {}
    for name in ("bias", "mask", "sinks", "alibi_slopes"):
        x = _tensor(options.pop(name, None), torch.float32)
        if x is None:
            continue
        if name in ("bias", "mask") and x.shape[-2] != 1:
            x = cut(x, "q", axis=x.dim() - 2)
        whole[name] = x.clone().requires_grad_(name in ("bias", "sinks"))
    known = {}
    if case["tell_lengths"]:
        n_q, n_k = case["q"].shape[1], case["k"].shape[1]
        standard = {"group": group, "layout": case["layout"]}
        known["lengths"] = lengths["q"] or distributed.shard_lengths(n_q, **standard)
        known["lengths_k"] = lengths["k"] or distributed.shard_lengths(n_k, **standard)
    if case["axes"] == 3:
        q3, k3, v3 = q[0], k[0], v[0]
    else:
        q3, k3, v3 = q, k, v
    out, lse = distributed.attention(
        q3, k3, v3, method=case["method"], return_lse=True, **places, **known, **options, **whole
    )
    if case["axes"] == 3:
        out, lse = out[None], lse[None]
    assert out.dtype == dtype and lse.dtype == torch.float32
    dout, dlse = cut(_tensor(case["dout"], dtype), "q"), cut(_tensor(case["dlse"], dtype), "q", 2)
    dlse = dlse.float().where(lse.detach().isfinite(), 0)
    wanted = [q, k, v, *(x for x in whole.values() if x.requires_grad)]
    gradients = torch.autograd.grad((out, lse), wanted, (dout, dlse))
    names = ["q", "k", "v", *(name for name, x in whole.items() if x.requires_grad)]
    given = dict(zip(names, gradients))
    results = {"out": out, "lse": lse, "q": given["q"], "k": given["k"], "v": given["v"]}
    joined = {
        name: distributed.unshard(x.detach().float(), axis=2 if name == "lse" else 1, **places)
        for name, x in results.items()
    }
    if "bias" in given:
        bias = given["bias"]
        sharded = case["options"]["bias"].shape[-2] != 1
        joined["bias"] = (
            distributed.unshard(bias, axis=bias.dim() - 2, **places) if sharded else bias
        )
    if "sinks" in given:
        joined["sinks"] = given["sinks"]
    shared = {"sinks"} | ({"bias"} if "bias" in given and not sharded else set())
    return {n: np.array(x.detach().cpu()) for n, x in joined.items()}, shared


def bits(size, case, times):
    """Hashes of the results of a deterministic call, repeated."""
    import torch

    torch.manual_seed(0)
    results = [attend(size, case)[0] for _ in range(times)]
    return [{name: x.tobytes() for name, x in result.items()} for result in results]


def helpers(size, mesh, layout, lengths, n):
    """shard, positions, unshard and shard_lengths of 0 to n - 1."""
    import torch

    from flashattn import distributed

    group = _group(size, mesh)
    x = torch.arange(n)
    named = {"group": group, "layout": layout}
    own = distributed.shard(x, axis=0, lengths=lengths, **named)
    at = distributed.positions(n, lengths=lengths, **named)
    back = distributed.unshard(own, axis=0, **named)
    return own.tolist(), at.tolist(), back.tolist(), distributed.shard_lengths(n, **named)


def traffic(size, method, layout, n, window, backward):
    """The bytes that this rank sends to each other rank in a forward (and backward)."""
    return _watch(size, method, layout, n, window, backward)[0]


def batches(size, method, backward, return_lse=False, groups=1):
    """The batches of messages that this rank posts, each of which costs the host time."""
    with _in_groups(groups):
        return _watch(size, method, "zigzag", 8 * size, None, backward, return_lse, groups)[1]


def _watch(size, method, layout, n, window, backward, return_lse=False, groups=1):
    import torch
    import torch.distributed as dist

    from flashattn import distributed

    sent, posted = {}, 0
    original, original_exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def counted(operations):
        nonlocal posted
        posted += 1
        for operation in operations:
            if operation.op is dist.isend:
                count = operation.tensor.numel() * operation.tensor.element_size()
                sent[operation.group_peer] = sent.get(operation.group_peer, 0) + count
        return original(operations)

    def counted_exchange(output, x, output_sizes, sizes, **named):
        nonlocal posted
        posted += 1
        for peer, count in enumerate(sizes):
            if count:
                sent[peer] = sent.get(peer, 0) + count * x.element_size()
        return original_exchange(output, x, output_sizes, sizes, **named)

    places = {"group": _group(size), "layout": layout}
    x = torch.randn(1, n, size * groups if method == "ulysses" else 1, 8)
    q = distributed.shard(x, **places).contiguous().requires_grad_()
    options = {"causal": True, "window": window, "return_lse": return_lse}
    dist.batch_isend_irecv, dist.all_to_all_single = counted, counted_exchange
    try:
        out = distributed.attention(q, q, q, method=method, **options, **places)
        if backward:
            sum(x.sum() for x in (out if return_lse else (out,))).backward()
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = original, original_exchange
    return sent, posted


def _made(options):
    """Replaces shapes by tensors; a dtype's name may precede the extents, and the values of
    cu_seqlens."""
    import torch

    made = {}
    for name, value in options.items():
        if name in ("bias", "mask", "sinks", "alibi_slopes"):
            dtype, shape = ("float32", value)
            if value and isinstance(value[0], str):
                dtype, *shape = value
            value = torch.zeros(shape, dtype=getattr(torch, dtype))
        elif isinstance(value, tuple) and name in ("cu_seqlens_q", "cu_seqlens_k"):
            value = torch.tensor(value[1], dtype=getattr(torch, value[0]))
        made[name] = value
    return made


def call(size, own, method="ring", layout="contiguous", mesh=None, common=None):
    """A plain call whose arguments are own[rank]: (shapes of q, k, v; options)."""
    import torch
    import torch.distributed as dist

    from flashattn import distributed

    shapes, options = own[dist.get_rank()]
    q, k, v = (None if shape is None else torch.zeros(shape) for shape in shapes)
    options = _made({**(common or {}), **options})
    group = options.pop("group", _group(size, mesh))
    out = distributed.attention(q, k, v, group=group, method=method, layout=layout, **options)
    return tuple(out.shape)


def fail(size, when, method="ring"):
    """Rank 1 fails: before it calls, in a kernel of the forward, or in one of the backward."""
    import torch
    import torch.distributed as dist

    from flashattn import _core, _distributed_ops, distributed

    rank = dist.get_rank()
    original = _distributed_ops._call

    def broken(function, *arguments, **options):
        if rank == 1 and function is getattr(_core, when):
            raise MemoryError("no memory for a test")
        original(function, *arguments, **options)

    x = torch.randn(1, 6, 6, 8, requires_grad=True)
    if when == "before":
        group = _groups[size, when]
        if rank == 1:
            raise MemoryError("no memory for a test")
    else:
        group = _groups[size, when + method]
    with _in_groups(2), unittest.mock.patch.object(_distributed_ops, "_call", broken):
        distributed.attention(x, x, x, group=group, method=method).sum().backward()


def recover(size, method, options, broken=None, after=0):
    """Makes a call that is an error on all ranks, and then a correct one in the same group; returns
    the error. broken: the library's function that fails, after this many calls that do not."""
    import torch

    from flashattn import _core, _distributed_ops, distributed

    original, done = _distributed_ops._call, 0

    def fails(function, *arguments, **options):
        nonlocal done
        if broken is not None and function is getattr(_core, broken):
            if done == after:
                raise ValueError("an error for a test")
            done += 1
        original(function, *arguments, **options)

    x = torch.randn(1, 6, 4 * size, 8, requires_grad=True)
    named = {"group": _groups[size, "usable"], "method": method}
    try:
        with _in_groups(2), unittest.mock.patch.object(_distributed_ops, "_call", fails):
            distributed.attention(x, x, x, **named, **_made(options)).sum().backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    distributed.attention(x, x, x, **named).sum().backward()
    return text


def join(size, own, axis):
    """unshard of tensors of the shapes own[rank]."""
    import torch
    import torch.distributed as dist

    from flashattn import distributed

    x = torch.zeros(own[dist.get_rank()])
    return tuple(distributed.unshard(x, group=_group(size), axis=axis).shape)


def in_part(size, method):
    """The gradients if the first rank's loss is of out alone, and all others' of lse alone."""
    import torch
    import torch.distributed as dist

    from flashattn import distributed

    torch.manual_seed(8)
    x = torch.randn(1, 5 * size, 2 * size, 8)
    own = distributed.shard(x, group=_group(size)).clone().requires_grad_()
    named = {"group": _group(size), "method": method, "return_lse": True, "causal": True}
    out, lse = distributed.attention(own, own, own, **named)
    # The same loss computed with both, for comparison.
    (out if dist.get_rank() == 0 else lse).sum().backward()
    found, own.grad = own.grad, None
    out, lse = distributed.attention(own, own, own, **named)
    first = float(dist.get_rank() == 0)
    (first * out.sum() + (1 - first) * lse.sum()).backward()
    torch.testing.assert_close(found, own.grad)


def die(size):
    """The last rank ends without a message."""
    import torch
    import torch.distributed as dist

    from flashattn import distributed

    if dist.get_rank() == size - 1:
        os._exit(1)
    x = torch.randn(1, 6, 1, 8)
    distributed.attention(x, x, x, group=_groups[size, "dead"], method="ring")


def compiled(size, method, layout, groups=None):
    """A training step, compiled as one graph, compared with the same in eager mode."""
    import torch

    from flashattn import distributed

    torch.manual_seed(3)
    weight = torch.randn(16, 3 * 4 * 8)
    x = torch.randn(2, 8 * size, 16)
    places = {"group": _group(size), "layout": layout}
    x = distributed.shard(x, **places).contiguous()
    torch.set_default_device(None)  # a mode that torch.compile would trace

    def step(x, weight):
        q, k, v = (x @ weight).view(*x.shape[:2], 3, 4, 8).unbind(2)
        out = distributed.attention(q, k, v, method=method, causal=True, scale=0.3, **places)
        return out.square().sum()

    results = []
    torch._dynamo.reset()
    try:
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            w = weight.clone().requires_grad_()
            with _in_groups(groups):
                loss = function(x, w)
            loss.backward()
            results.append((loss.detach(), w.grad))
    finally:
        torch.set_default_device(DEVICE if GPUS else None)
    torch.testing.assert_close(*results)


def checkpointed(size, method):
    import torch
    from torch.utils.checkpoint import checkpoint

    from flashattn import distributed

    torch.manual_seed(4)
    x = torch.randn(1, 5 * size, 4, 8)
    own = distributed.shard(x, group=_group(size)).contiguous()

    def block(x):
        y = torch.tanh(x)
        return distributed.attention(y, y, y, group=_group(size), method=method, causal=True)

    results = []
    for again in (False, True):
        y = own.clone().requires_grad_()
        out = checkpoint(block, y, use_reentrant=False) if again else block(y)
        out.square().sum().backward()
        results.append(y.grad)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def fully_sharded(size):
    """FSDP2 over the ranks that share the sequence, compared with one process that has it all."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import flashattn
    from flashattn import distributed

    mesh = DeviceMesh(DEVICE, torch.arange(size, device="cpu"))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.qkv = torch.nn.Linear(16, 3 * 16, bias=False)
            self.sinks = torch.nn.Parameter(torch.randn(2))
            self.group = None

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)
            options = {"causal": True, "sinks": self.sinks}
            if self.group is None:
                return flashattn.attention(q, k, v, **options)
            return distributed.attention(q, k, v, group=self.group, layout="zigzag", **options)

    x = torch.randn(2, 23, 16, generator=torch.Generator(DEVICE).manual_seed(6))
    expected = Layer()
    expected(x).square().sum().backward()
    layer = Layer()
    layer.group = _group(size)
    fully_shard(layer, mesh=mesh)
    own = distributed.shard(x, group=_group(size), layout="zigzag")
    layer(own).square().sum().backward()
    for name, parameter in layer.named_parameters():
        gradient = size * parameter.grad.full_tensor()  # FSDP's is the mean over the ranks
        wanted = dict(expected.named_parameters())[name].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def language_model(size, layout):
    """A small Llama whose sequence is distributed over the ranks, compared with one process that
    has all of it."""
    import torch
    import transformers

    import flashattn.transformers
    from flashattn import distributed

    places = {"group": _group(size), "layout": layout}
    name = flashattn.transformers.register_distributed(**places)

    def config():  # one for each model, because the model changes it
        return transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
            use_cache=False,
        )

    torch.manual_seed(7)
    expected = transformers.LlamaForCausalLM._from_config(config(), attn_implementation="eager")
    model = transformers.LlamaForCausalLM._from_config(config(), attn_implementation=name)
    model.load_state_dict(expected.state_dict())
    n = 21
    ids = torch.randint(50, (2, n))
    wanted = expected(ids).logits
    wanted.square().sum().backward()
    own = distributed.shard(ids, **places)
    at = distributed.positions(n, **places)[None]
    logits = model(own, position_ids=at).logits
    logits.square().sum().backward()
    whole = distributed.unshard(logits.detach(), **places)
    for x in model.parameters():
        torch.distributed.all_reduce(x.grad, group=places["group"])
    # If a rank fails after this point, no other rank waits for it.
    torch.testing.assert_close(whole, wanted.detach(), rtol=1e-4, atol=1e-4)
    for x, y in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)
    try:
        model(own, attention_mask=torch.zeros_like(own))
    except NotImplementedError as error:
        return str(error)


def benchmark(size, folder):
    """bench/distributed.py, with one peer that is wrong and one that fails on rank 1."""
    import sys
    import types

    import torch
    import torch.distributed as dist

    sys.path.insert(0, folder)
    import distributed as script

    @contextlib.contextmanager
    def wrong(q, k, v, dout):
        with script.PEERS["flashattn-ring"](q, k, v, dout) as (attend, *rest):
            yield lambda q, k, v: attend(q, k, v) * 1.1, *rest

    @contextlib.contextmanager
    def failing(q, k, v, dout):
        if dist.get_rank() == 1:
            raise RuntimeError("no such kernel")
        with script.alone(*(script.rows_of(x) for x in (q, k, v, dout))) as work:
            yield work

    script.PEERS.update(wrong=wrong, failing=failing)
    args = types.SimpleNamespace(
        device=DEVICE, heads=8, heads_kv=8, dim=8, rounds=2, budget=0.1, peers=list(script.PEERS)
    )
    torch.manual_seed(0)
    args.host = script.measure_host(args)
    return args.host, script.measure(32, args)["results"]
