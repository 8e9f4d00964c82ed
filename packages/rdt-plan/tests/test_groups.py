import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_plan import (
    Manifest,
    ManifestError,
    ParamMeta,
    gather_groups,
    group_key,
    group_ordered,
    group_schedule,
    rank_schedule,
)
from rdt_plan.testing import manifests

NAMES = st.lists(
    st.sampled_from(
        ["embed", "merger", "lm_head.weight", "visual.blocks.0.a", "visual.blocks.1.a"]
        + [f"model.layers.{i}.{p}" for i in (0, 1, 10) for p in ("a", "mlp.experts.3.w1")]
    ),
    unique=True,
)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.mlp.experts.7.w1", "model.layers.3"),
        ("visual.blocks.0.attn.qkv.weight", "visual.blocks.0"),
        ("h.0.ln_1.weight", "h.0"),
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("backbone.layers.47.mixer.in_proj.weight", "backbone.layers.47"),
        ("visual.blocks.31.mlp.fc1.bias", "visual.blocks.31"),
        ("model.language_model.layers.2.mlp.gate.weight", "model.language_model.layers.2"),
        ("model.layers.60.mlp.experts.255.down_proj.weight", "model.layers.60"),
        ("model.layers.4.block_sparse_moe.experts.7.w2.weight", "model.layers.4"),
        ("0.weight", "0"),
        ("lm_head.weight", None),
        ("model.layer3.weight", None),
        ("model.layers.-1.weight", None),
        ("model.layers.²._", None),
        ("model.layers.٣.weight", None),
        ("", None),
    ],
)
def test_group_key(name: str, key: str | None) -> None:
    assert group_key(name) == key


def test_two_stacks_in_one_model_stay_apart() -> None:
    names = ["visual.patch", "visual.blocks.0.w", "visual.blocks.1.w"]
    names += ["model.layers.0.w", "model.layers.0.mlp.experts.5.w", "model.layers.1.w"]
    names += ["model.norm", "lm_head"]
    groups = gather_groups(names)
    assert [(g.index, g.key) for g in groups] == [
        (0, "pre"),
        (1, "visual.blocks.0"),
        (2, "visual.blocks.1"),
        (3, "model.layers.0"),
        (4, "model.layers.1"),
        (5, "post"),
    ]
    assert groups[3].names == ("model.layers.0.w", "model.layers.0.mlp.experts.5.w")
    assert groups[5].names == ("model.norm", "lm_head")


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (
            ["transformer.wte.weight", "transformer.wpe.weight"]
            + [
                f"transformer.h.{i}.{p}"
                for i in (0, 1)
                for p in ("ln_1.weight", "attn.c_attn.bias")
            ]
            + ["transformer.ln_f.weight"],
            ["pre", "transformer.h.0", "transformer.h.1", "post"],
        ),
        (
            ["backbone.embedding.weight"]
            + [f"backbone.layers.{i}.{p}" for i in (0, 1) for p in ("norm.weight", "mixer.A_log")]
            + ["backbone.norm_f.weight", "lm_head.weight"],
            ["pre", "backbone.layers.0", "backbone.layers.1", "post"],
        ),
        (  # two stacks, and a projector that is delivered last
            ["model.visual.patch_embed.proj.weight"]
            + [f"model.visual.blocks.{i}.attn.qkv.weight" for i in (0, 1)]
            + [f"model.language_model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]
            + ["model.visual.merger.mlp.weight", "lm_head.weight"],
            [
                "pre",
                *("model.visual.blocks.0", "model.visual.blocks.1"),
                *("model.language_model.layers.0", "model.language_model.layers.1"),
                "post",
            ],
        ),
        (  # an expert stays with its layer, whatever its own index
            ["model.embed_tokens.weight"]
            + [
                f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                for layer in (0, 1)
                for expert in (0, 1, 10)
                for part in ("gate", "up", "down")
            ]
            + ["model.norm.weight"],
            ["pre", "model.layers.0", "model.layers.1", "post"],
        ),
    ],
    ids=["gpt2", "mamba", "two stacks", "experts"],
)
def test_names_of_real_models_are_cut_by_layer(names: list[str], keys: list[str]) -> None:
    groups = gather_groups(names)
    assert [group.key for group in groups] == keys
    assert [name for group in groups for name in group.names] == names


def test_a_model_without_indices_is_one_group() -> None:
    assert [g.key for g in gather_groups(["a", "b"])] == ["pre"]
    assert gather_groups([]) == ()


@pytest.mark.parametrize(
    ("names", "offender"),
    [
        (["l.0.a", "l.1.a", "l.0.b"], "l.0.b"),
        (["v.0.a", "merger", "l.0.a", "norm"], "norm"),
        (["l.0.a", "l.1.a", "norm", "l.0.b", "head"], "l.0.b"),
    ],
)
def test_an_interrupted_group_is_refused_by_name_with_the_remedy(
    names: list[str], offender: str
) -> None:
    with pytest.raises(ManifestError, match=f"'{offender}' follows.*group_ordered"):
        gather_groups(names)
    gather_groups(group_ordered(names))


@given(NAMES)
def test_group_ordered_is_stable_and_accepted(names: list[str]) -> None:
    ordered = group_ordered(names)
    assert sorted(ordered) == sorted(names)
    assert group_ordered(ordered) == ordered
    groups = gather_groups(ordered)
    assert [name for group in groups for name in group.names] == ordered
    for group in groups:
        assert list(group.names) == [name for name in names if name in group.names]
    first = {group.key: names.index(group.names[0]) for group in groups}
    indexed = [first[group.key] for group in groups if group.key not in ("pre", "post")]
    assert indexed == sorted(indexed)


def test_schedule_alternates_between_pipeline_stages() -> None:
    stages = {0: (0, 1), 1: (2, 3)}
    names = [("embed", 0), ("l.0.w", 0), ("l.1.w", 0), ("l.2.w", 1), ("l.3.w", 1), ("norm", 1)]
    manifest = Manifest.build(ParamMeta(n, "int8", (1,), stages[s]) for n, s in names)
    assert group_schedule(manifest) == (0, 3, 1, 4, 2, 5)


def test_a_shared_first_group_does_not_serialise_the_stages() -> None:
    names = [("embed", (0, 2)), ("l.0.w", (0,)), ("l.1.w", (1,)), ("l.2.w", (2,)), ("norm", (2,))]
    manifest = Manifest.build(ParamMeta(n, "int8", (1,), owners) for n, owners in names)
    assert group_schedule(manifest) == (0, 2, 1, 3, 4)


def test_experts_on_other_ranks_keep_their_layer_in_place() -> None:
    params = [
        ParamMeta(f"l.{layer}.experts.{e}.w", "int8", (1,), (e,))
        for layer in range(3)
        for e in range(4)
    ]
    manifest = Manifest.build(params)
    assert group_schedule(manifest) == (0, 1, 2)
    assert rank_schedule(manifest, 3) == (0, 1, 2)


@given(manifests())
def test_schedule_is_a_permutation_that_keeps_each_ranks_manifest_order(
    manifest: Manifest,
) -> None:
    schedule = group_schedule(manifest)
    assert sorted(schedule) == list(range(len(manifest.groups)))
    for rank in range(5):
        own = [
            group.index
            for group in manifest.groups
            if any(rank in manifest.param(name).holders for name in group.names)
        ]
        assert list(rank_schedule(manifest, rank)) == own
        assert [group for group in schedule if group in own] == own
    if len({param.holders for param in manifest.params}) == 1:
        assert schedule == tuple(range(len(manifest.groups)))
