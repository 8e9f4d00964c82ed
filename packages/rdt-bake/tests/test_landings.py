"""Real loads against recorded ones, for chains of views and regions that are drawn."""

from collections.abc import Callable, Iterable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rdt_bake import (
    record,
)
from rdt_bake.testing import check_recording, random_weights
from rdt_plan import ITEM_BYTES, ParamMeta

Pairs = Iterable[tuple[str, Tensor]]
Chain = list[Callable[[Tensor], Tensor]]

DTYPES = sorted(set(ITEM_BYTES) - {"float4_e2m1fn_x2", "complex32"})


class Holder(nn.Module):
    """One parameter of a given geometry."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


@st.composite
def view_chains(draw: st.DrawFn, start: Tensor) -> tuple[Chain, Tensor]:
    """Operations that read a strided part of ``start``, and their result on it."""
    chain: Chain = []
    now = start
    for _ in range(draw(st.integers(0, 5))):
        steps = ["unsqueeze", "flatten", "contiguous", "clone", "detach", "expand", "bytes"]
        if now.ndim:
            steps += [
                "narrow",
                "narrow",
                "select",
                "step",
                "transpose",
                "split",
                "chunk",
                "squeeze",
            ]
            steps += ["T", "diagonal", "permute"]
        step = draw(st.sampled_from(steps))
        dim = draw(st.integers(0, now.ndim - 1)) if now.ndim else 0
        extent = now.shape[dim] if now.ndim else 1
        if step == "narrow":
            lo = draw(st.integers(0, extent))
            size = draw(st.integers(0 if draw(st.booleans()) else min(1, extent - lo), extent - lo))
            apply = lambda t, d=dim, a=lo, n=size: t.narrow(d, a, n)  # noqa: E731
        elif step == "select" and extent:
            at = draw(st.integers(0, extent - 1))
            apply = lambda t, d=dim, a=at: t.select(d, a)  # noqa: E731
        elif step == "step":
            by = draw(st.integers(1, 3))
            apply = lambda t, d=dim, b=by: t[(slice(None),) * d + (slice(None, None, b),)]  # noqa: E731
        elif step == "transpose":
            apply = lambda t, d=dim: t.transpose(0, d)  # noqa: E731
        elif step == "permute":
            order = tuple(draw(st.permutations(range(now.ndim))))
            apply = lambda t, o=order: torch.permute(t, o)  # noqa: E731
        elif step == "split" and extent:
            inner = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
            apply = lambda t, d=dim, n=inner: t.unflatten(d, (-1, n))  # noqa: E731
        elif step == "chunk" and extent:
            pieces = len(now.chunk(2, dim))
            at = draw(st.integers(0, pieces - 1))
            apply = lambda t, d=dim, a=at: torch.chunk(t, 2, d)[a]  # noqa: E731
        elif step == "diagonal" and now.ndim >= 2:
            apply = lambda t: torch.diagonal(t, 0, 0, 1)  # noqa: E731
        elif step == "T" and now.ndim == 2:
            apply = lambda t: t.T  # noqa: E731
        elif step == "squeeze":
            apply = lambda t: t.squeeze()  # noqa: E731
        elif step == "unsqueeze":
            apply = lambda t, d=dim: t.unsqueeze(d)  # noqa: E731
        elif step == "flatten":
            apply = lambda t: t.reshape(-1)  # noqa: E731
        elif step == "contiguous":
            apply = lambda t: t.contiguous()  # noqa: E731
        elif step == "clone":
            apply = lambda t: t.clone()  # noqa: E731
        elif step == "expand" and now.numel() < 100:
            apply = lambda t: t.expand(2, *t.shape)  # noqa: E731
        elif step == "bytes":
            try:
                now.view(torch.uint8)
            except RuntimeError:
                continue
            if now.ndim == 0 or now.numel() == 0:  # strides of empty tensors are anybody's
                continue
            apply = lambda t: t.view(torch.uint8)  # noqa: E731
        else:
            apply = lambda t: t.detach()  # noqa: E731
        chain.append(apply)
        now = apply(now)
    return chain, now


def run_chain(chain: Chain, tensor: Tensor) -> Tensor:
    for apply in chain:
        tensor = apply(tensor)
    return tensor


@st.composite
def targets(draw: st.DrawFn, value: Tensor) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """A parameter shape, and a view of such a parameter that has ``value``'s shape."""
    before = [draw(st.integers(0, 2)) for _ in value.shape]
    after = [draw(st.integers(0, 1)) for _ in value.shape]
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in value.shape]
    order = tuple(draw(st.permutations(range(value.ndim))))
    sizes = [
        lo + max(n * step, 1) + hi
        for lo, n, step, hi in zip(before, value.shape, steps, after, strict=True)
    ]
    cuts = tuple(
        slice(lo, lo + n * step, step)
        for lo, n, step in zip(before, value.shape, steps, strict=True)
    )
    back = sorted(range(value.ndim), key=lambda dim: order[dim])
    return tuple(sizes[dim] for dim in order), lambda param: param.permute(back)[cuts]


@st.composite
def copies(draw: st.DrawFn):
    """A source, a chain of views of it, a parameter, and the region of it that is written."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))
    meta = ParamMeta("w", dtype, shape)
    chain, value = draw(view_chains(random_weights([meta])["w"]))
    into = value.dtype
    floats = ["float32", "bfloat16", "float16", "float64"]
    if draw(st.booleans()) and str(value.dtype).removeprefix("torch.") in floats:
        into = getattr(torch, draw(st.sampled_from(floats)))
    param_shape, target = draw(targets(value))
    return meta, chain, param_shape, into, target


@given(copies())
@settings(max_examples=400, deadline=None)
def test_a_chain_of_views_replays_bit_for_bit(case) -> None:
    meta, chain, param_shape, dtype, target = case

    def load(model: Holder, pairs: Pairs) -> None:
        for _, weight in pairs:
            target(model.weight.data).copy_(run_chain(chain, weight))

    recording = check_recording(
        lambda: Holder(param_shape, dtype), load, [meta], exempt=lambda *_: True
    )
    assert recording.consumed == {"w"}
    landed = sum(
        len(torch.empty(write.shape, device="meta").view(-1)) for write in recording.writes
    )
    probe = run_chain(chain, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)))
    assert landed == probe.numel()
    for placement in recording.placements:
        assert placement.slice.numel <= probe.numel()


@st.composite
def write_histories(draw: st.DrawFn):
    """Several copies and fills of one small parameter, in overlapping boxes."""
    shape = tuple(draw(st.sampled_from([2, 3, 4])) for _ in range(draw(st.integers(1, 3))))
    history = []
    for which in range(draw(st.integers(1, 5))):
        cuts = []
        for extent in shape:
            lo = draw(st.integers(0, extent - 1))
            cuts.append(slice(lo, draw(st.integers(lo + 1, extent)), draw(st.integers(1, 2))))
        fill = draw(st.sampled_from([None, None, 0.0, 1.5]))
        history.append((f"w{which}", tuple(cuts), fill, draw(st.booleans())))
    return shape, history


@given(write_histories())
@settings(max_examples=300, deadline=None)
def test_overlapping_writes_replay_in_any_order(case) -> None:
    shape, history = case
    metas = [ParamMeta(name, "float32", shape) for name, *_ in history]

    def load(model: Holder, pairs: Pairs) -> None:
        for (_, weight), (_, cuts, fill, copied) in zip(pairs, history, strict=True):
            if fill is not None:
                model.weight.data[cuts].fill_(fill)
            elif copied:
                turned = weight.transpose(0, -1).contiguous().transpose(0, -1)
                model.weight.data[cuts].copy_(turned[cuts])
            else:
                model.weight.data[cuts] = weight[cuts]

    recording = check_recording(lambda: Holder(shape), load, metas, exempt=lambda *_: True)
    written = torch.zeros(shape, dtype=torch.bool)
    for _, cuts, _, _ in history:
        written[cuts] = True
    exact = record(model := Holder(shape), lambda pairs: load(model, pairs), metas).uncovered
    missing = (~written).nonzero()
    if not len(missing):
        assert exact == () and recording.uncovered == ()
        return
    (found,) = exact
    assert found.num_missing == len(missing)
    bounds = zip(missing.min(0).values.tolist(), (missing.max(0).values + 1).tolist(), strict=True)
    assert found.bounds == tuple(bounds)
