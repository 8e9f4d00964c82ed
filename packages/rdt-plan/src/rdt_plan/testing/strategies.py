"""Hypothesis strategies for manifests, slices and what is written from them; all small."""

from collections.abc import Sequence

from hypothesis import strategies as st

from rdt_plan.direct import DirectRule
from rdt_plan.manifest import Manifest, ParamMeta
from rdt_plan.placement import Fill, Placement, Write
from rdt_plan.plan import ConsumerId, SyncPlan, build_plan
from rdt_plan.slices import Slice, canonical, contiguous_stride
from rdt_plan.testing.meshes import over_a_mesh

__all__ = [
    "direct_rules",
    "dtype_names",
    "fills",
    "manifests",
    "param_metas",
    "placements",
    "plans",
    "regions",
    "slices",
    "writes",
]


@st.composite
def _shapes(draw: st.DrawFn, max_dims: int = 3) -> tuple[int, ...]:
    """Small shapes, seldom empty."""
    shape = draw(st.lists(st.integers(1, 6), max_size=max_dims))
    if shape and draw(st.integers(0, 15)) == 15:
        shape[-1] = 0
    return tuple(shape)


def dtype_names() -> st.SearchStrategy[str]:
    """Dtypes of 1, 2, 4 and 8 bytes."""
    return st.sampled_from(("int8", "float8_e4m3fn", "bfloat16", "float32", "int64"))


@st.composite
def param_metas(
    draw: st.DrawFn, name: str = "w", owners: tuple[int, ...] = (0,), max_dims: int = 3
) -> ParamMeta:
    """A parameter held whole, scalars and empty tensors included."""
    return ParamMeta(name, draw(dtype_names()), draw(_shapes(max_dims)), owners)


@st.composite
def manifests(draw: st.DrawFn, max_ranks: int = 4, max_layers: int = 3) -> Manifest:
    """Up to two stacks of layers between un-indexed names, held by up to ``max_ranks`` ranks.

    Held by all ranks, by pipeline stages, by experts (name by name), by anybody, or over meshes.
    """
    parts = [[f"embed.{c}" for c in "ab"[: draw(st.integers(0, 2))]]]
    for stack in ("model.layers", "visual.blocks")[: draw(st.integers(1, 2))]:
        for layer in range(draw(st.integers(1, max_layers))):
            parts.append([f"{stack}.{layer}.w{i}" for i in range(draw(st.integers(1, 3)))])
    parts.append([f"norm.{c}" for c in "ab"[: draw(st.integers(0, 2))]])
    ranks = range(draw(st.integers(1, max_ranks)))
    some = st.sets(st.sampled_from(ranks), min_size=1).map(lambda found: tuple(sorted(found)))
    one = st.sampled_from(ranks).map(lambda rank: (rank,))
    held = draw(st.sampled_from(("stages", "experts", "anybody", "everybody", "meshes")))
    params = []
    for at, names in enumerate(parts):
        stage = (at * len(ranks) // len(parts),)
        for name in names:
            owners = {"everybody": st.just(tuple(ranks)), "stages": st.just(stage)}.get(
                held, one if held == "experts" else some
            )
            param = draw(param_metas(name, draw(owners)))
            if held == "meshes" and draw(st.integers(0, 3)):
                param = draw(over_a_mesh(param, ranks))
            params.append(param)
    return Manifest.build(params)


@st.composite
def slices(draw: st.DrawFn, meta: ParamMeta) -> Slice:
    """A region of ``meta``: its dims narrowed, thinned and permuted, or its raw bytes."""
    shape, stride = list(meta.shape), list(contiguous_stride(meta.shape))
    dtype, offset = meta.dtype, 0
    if draw(st.integers(0, 9)) == 9:
        dtype, shape, stride = "uint8", [meta.num_bytes], [1]
    for dim, extent in enumerate(shape):
        num_rows = draw(st.integers(min(extent, 1), extent))
        start = draw(st.integers(0, extent - num_rows))
        stop, step = start + num_rows, draw(st.sampled_from((1, 1, 1, 2)))
        offset += start * stride[dim]
        shape[dim] = len(range(start, stop, step))
        stride[dim] *= step
    order = draw(st.permutations(range(len(shape))))
    return canonical(
        meta.name, dtype, offset, [shape[d] for d in order], [stride[d] for d in order]
    )


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Offset and strides of a region of ``shape`` that touches no element twice; often one run."""
    if not draw(st.integers(0, 2)):
        return draw(st.integers(0, 3)), contiguous_stride(shape)
    stride = [0] * len(shape)
    span = 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = span + draw(st.integers(0, 2))
        span = stride[dim] * max(shape[dim], 1)
    return draw(st.integers(0, 3)), tuple(stride)


def _factors(extent: int) -> list[int]:
    """Prime factors, ascending; [0] for 0 and [] for 1."""
    if extent == 0:
        return [0]
    factors = []
    divisor = 2
    while extent > 1:
        while extent % divisor == 0:
            factors.append(divisor)
            extent //= divisor
        divisor += 1
    return factors


@st.composite
def placements(
    draw: st.DrawFn,
    slice_: Slice,
    module: str = "layer",
    param: str = "weight",
    aligned: bool = False,
    broadcast: bool = True,
) -> Placement:
    """A byte copy of ``slice_`` into dims of its own.

    Args:
        aligned: every destination dim splits or merges dims of the slice, as a loader's do;
            otherwise any dims of as many elements.
        broadcast: allow repeats.
    """
    factors = [factor for extent in slice_.shape for factor in _factors(extent)]
    if not aligned:
        factors = draw(st.permutations(factors))
    shape: list[int] = []
    for factor in factors:
        if shape and draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape.append(factor)
    for _ in range(draw(st.integers(0, 1))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    source_stride = list(contiguous_stride(shape))
    if broadcast and draw(st.integers(0, 4)) == 4:
        at = draw(st.integers(0, len(shape)))
        shape.insert(at, draw(st.integers(2, 3)))
        source_stride.insert(at, 0)
    offset, stride = draw(regions(tuple(shape)))
    return Placement(
        slice_, module, param, offset, tuple(shape), stride, slice_.dtype, tuple(source_stride)
    )


@st.composite
def fills(draw: st.DrawFn, module: str = "layer", param: str = "weight") -> Fill:
    """A constant: integer, bool or float, infinities included."""
    shape = draw(_shapes())
    offset, stride = draw(regions(shape))
    value = draw(st.one_of(st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False)))
    return Fill(module, param, offset, shape, stride, draw(dtype_names()), value)


@st.composite
def writes(
    draw: st.DrawFn, manifest: Manifest, min_writes: int = 0, max_writes: int = 8
) -> tuple[Write, ...]:
    """What a consumer writes; no two writes share a tensor, some share a slice."""
    known: list[Slice] = []
    found: list[Write] = []
    for index in range(draw(st.integers(min_writes, max_writes))):
        module, param = draw(st.sampled_from(("", "a", "a.b", "c"))), f"p{index}"
        if draw(st.integers(0, 7)) == 7:
            found.append(draw(fills(module, param)))
            continue
        if not known or draw(st.integers(0, 3)):
            known.append(draw(slices(draw(st.sampled_from(manifest.params)))))
        found.append(draw(placements(draw(st.sampled_from(known)), module, param)))
    return tuple(found)


@st.composite
def direct_rules(draw: st.DrawFn, manifest: Manifest, drawn: Sequence[Write]) -> DirectRule:
    """Some or all names, by rank, and some or all of the tensors that are written."""
    names = frozenset(param.name for param in manifest.params)
    places = frozenset((write.module, write.param) for write in drawn)
    ranks = {rank for param in manifest.params for rank in param.owners}
    some = st.frozensets(st.sampled_from(sorted(names)))
    some_places = st.frozensets(st.sampled_from(sorted(places))) if places else st.just(places)
    return DirectRule(
        {rank: draw(st.one_of(st.just(names), some)) for rank in sorted(ranks)},
        draw(st.one_of(st.just(places), some_places)),
    )


@st.composite
def plans(
    draw: st.DrawFn, direct: bool = False
) -> tuple[Manifest, tuple[Write, ...], int, SyncPlan]:
    """A plan after what it was built from: manifest, writes and number of workers.

    ``direct``: and from a rule that makes some of its chunks direct.
    """
    manifest = draw(manifests())
    drawn = draw(writes(manifest, min_writes=3, max_writes=10))
    num_workers = draw(st.integers(1, 5))
    plan = build_plan(
        manifest,
        drawn,
        ConsumerId(draw(st.integers(0, 2)), draw(st.integers(0, num_workers - 1))),
        num_workers=num_workers,
        num_slots=draw(st.integers(1, 3)),
        max_chunk_bytes=draw(st.sampled_from((64, 16, 200, 1, 1 << 20))),
        direct=draw(direct_rules(manifest, drawn)) if direct else None,
        max_direct_bytes=draw(st.sampled_from((1 << 30, 64, 7, 1))) if direct else 1,
    )
    return manifest, drawn, num_workers, plan
