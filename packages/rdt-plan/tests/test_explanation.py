from rdt_plan import (
    ConsumerId,
    Fill,
    Manifest,
    ParamMeta,
    Placement,
    build_plan,
    contiguous_stride,
    whole,
)


def test_explains_every_chunk_and_the_totals() -> None:
    params = [ParamMeta(f"l.0.w{i}", "int8", (1000, 2), (0,)) for i in range(4)]
    params.append(ParamMeta("l.1.w", "bfloat16", (3,), (1,)))
    drawn: list = [Fill("padded", "w", 0, (2,), (1,), "int8", 0)]
    for param in params:
        stride = contiguous_stride(param.shape)
        module = param.name[:3] if param.name != "l.1.w" else ""
        drawn.append(
            Placement(whole(param), module, "w", 0, param.shape, stride, param.dtype, stride)
        )
    plan = build_plan(
        Manifest.build(params), drawn, ConsumerId(0, 1), num_workers=2, max_chunk_bytes=6500
    )
    assert plan.explain().split("\n") == [
        f"plan {plan.digest[:12]} of r0w1: 3 chunks of at most 6.3 KiB from ranks 0, 1",
        f"manifest {plan.manifest_digest[:12]}, 2 gather groups, 2 receive slots of 5.9 KiB",
        "group 0 (scheduled 0):",
        "  chunk 0: owner 0 seq 0, serve slot 0 -> receive slot 0, 5.9 KiB, 3 slices, "
        "3 placements, l.0.w0 .. l.0.w2 (3)",
        "  chunk 1: owner 0 seq 1, serve slot 1 -> receive slot 0, 2.0 KiB, 1 slice, 1 placement, "
        "l.0.w3; completes l.0",
        "group 1 (scheduled 1):",
        "  chunk 2: owner 1 seq 0, serve slot 0 -> receive slot 1, 6 B, 1 slice, 1 placement, "
        "l.1.w; completes (root)",
        "total: pulls 7.8 KiB (7.8 KiB of slices; 0 B direct, 7.8 KiB staged), lands 7.8 KiB "
        "in 3 modules, 1 fill, 1 module without chunks",
    ]


def test_explains_a_plan_that_reads_nothing() -> None:
    manifest = Manifest.build([ParamMeta("w", "int8", (1,))])
    text = build_plan(manifest, [], ConsumerId(0, 0), num_workers=1).explain()
    assert "0 chunks" in text
    assert "from nobody" in text
