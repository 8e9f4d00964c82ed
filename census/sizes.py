"""Small sizes for the configuration of any model, found by the names of its keys."""

from typing import Any

__all__ = [
    "EXPERTS",
    "HEADS",
    "HEAD_DIM",
    "HIDDEN",
    "INTER",
    "KV_HEADS",
    "LAYERS",
    "MOE_INTER",
    "POSITIONS",
    "TOP_K",
    "VOCAB",
    "shrunk",
]

HIDDEN, INTER, MOE_INTER, HEADS, KV_HEADS, HEAD_DIM = 128, 192, 64, 4, 2, 32
VOCAB, EXPERTS, TOP_K, LAYERS, POSITIONS = 256, 4, 2, 2, 512

_SIZES = {
    key: size
    for keys, size in {
        "hidden_size d_model n_embd hidden_dim projector_hidden_size text_hidden_size"
        " merged_hidden_size word_embed_proj_dim attention_hidden_size"
        " projection_hidden_size": HIDDEN,
        "intermediate_size ffn_dim ffn_hidden_size n_inner intermediate_size_mlp encoder_ffn_dim"
        " decoder_ffn_dim shared_intermediate_size dense_intermediate_size block_ff_dim": INTER,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size"
        " moe_shared_expert_intermediate_size": MOE_INTER,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads"
        " decoder_attention_heads swa_num_attention_heads": HEADS,
        "head_dim swa_head_dim attention_head_dim kv_channels": HEAD_DIM,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth": LAYERS,
        "vocab_size vocab_size_per_layer_input": VOCAB,
        "max_position_embeddings n_positions max_seq_len model_max_length"
        " max_target_positions": POSITIONS,
        "num_experts n_routed_experts num_local_experts moe_num_experts": EXPERTS,
        "num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts num_experts_per_token": TOP_K,
        "n_group topk_group num_expert_group n_groups": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "max_window_layers": LAYERS,
        "first_k_dense_replace num_dense_layers": 1,
        "type_vocab_size": 2,
        "image_size": 56,
        "patch_size": 14,
        "num_nextn_predict_layers": 0,
    }.items()
    for key in keys.split()
}

_KV_KEYS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")

# Lists with one entry a layer.
_LAYER_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "indexer_types",
    "no_rope_layers",
    "num_attention_heads_per_layer",
    "layer_rope_theta",
)


def shrunk(config: dict[Any, Any]) -> dict[str, Any]:
    """A copy of ``config``, sub-configurations included, with every known size made small.

    Keys may be numbers, as in a table. Token ids move below the small vocabulary. Of a list with
    one entry a layer, the first layer of each kind stays.
    """
    small: dict[Any, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key not in ("rope_parameters", "rope_scaling"):
            value = shrunk(value)
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            value = _SIZES[key]
        elif key in _KV_KEYS and isinstance(value, int):
            value = HEADS if "kv_lora_rank" in config else KV_HEADS
        elif isinstance(key, str) and key.endswith(("_token_id", "_token_index", "_token_ids")):
            if isinstance(value, int) and value >= VOCAB:
                value = VOCAB - 1 - _small_number(key)
            elif isinstance(value, list):
                value = [v % VOCAB if isinstance(v, int) else v for v in value]
        small[key] = value
    return small | _layers(config, small)


def _small_number(name: str) -> int:
    """Below 64, and different for most names, so that special tokens differ."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(name)) % 64


def _layers(before: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """The keys that say how many layers there are and of which kind, if there are such lists."""
    lists = {
        key: value
        for key, value in before.items()
        if isinstance(value, list) and key in _LAYER_LISTS and len(value) > 1
    }
    if not lists:
        return {}
    kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=False)]
    keep = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    if len(keep) < LAYERS:
        keep = list(range(LAYERS))
    counts = {
        key: len(keep) for key in ("num_hidden_layers", "n_layers", "num_layers") if key in small
    }
    return {key: [value[i] for i in keep] for key, value in lists.items()} | counts
