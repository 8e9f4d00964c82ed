"""Configurations of draft models, each of which shares one with a model that it drafts for.

A draft is built and loaded by itself: its configuration is the engine's, and speculation is on.
"""

from typing import Any

from census.sizes import LAYERS, VOCAB

__all__ = ["DRAFTS", "OWN_DRAFTS"]

_ONE: dict[str, Any] = {"num_nextn_predict_layers": 1}
_EAGLE: dict[str, Any] = {"draft_vocab_size": VOCAB}
_DFLASH: dict[str, Any] = {
    "draft_vocab_size": VOCAB,
    "target_layer_ids": [0, 1],
    "block_size": 4,
    "markov_rank": 16,
    "dflash_config": {
        "target_layer_ids": [0, 1],
        "mask_token_id": 5,
        "selector_rank": 16,
        "selector_top_k": 4,
        "conv_kernel_size": 3,
        "conv_group_size": 32,
        "lilicorr_hidden_size": 64,
        "lilicorr_candidate_topk": 4,
        "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 2,
        "lilicorr_factor_dim": 16,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 1.0,
        "lilicorr_num_layers": 1,
    },
}

# Layers in the checkpoint of the model that they draft for. vLLM itself makes their configuration
# of that model's: by architecture, whose checkpoint it is and what that configuration has besides.
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeekMTPModel": ("DeepseekV3ForCausalLM", _ONE),
    "DeepseekV32MTPModel": ("DeepseekV32ForCausalLM", _ONE),
    "DeepSeekV4MTPModel": ("DeepseekV4ForCausalLM", _ONE),
    "OpenPanguMTPModel": ("PanguUltraMoEForCausalLM", {**_ONE, "model_type": "pangu_ultra_moe"}),
    "MiMoMTPModel": ("MiMoForCausalLM", _ONE),
    "MiMoV2MTPModel": ("MiMoV2ForCausalLM", {}),
    "Glm4MoeMTPModel": ("Glm4MoeForCausalLM", _ONE),
    "Glm4MoeLiteMTPModel": (
        "Glm4MoeLiteForCausalLM",
        {**_ONE, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse", "sparse"]},
    ),
    "GlmOcrMTPModel": (
        "GlmOcrForConditionalGeneration",
        {"text_config.num_nextn_predict_layers": 1},
    ),
    "ErnieMTPModel": ("Ernie4_5_MoeForCausalLM", _ONE),
    "NemotronHMTPModel": (
        "NemotronHForCausalLM",
        {**_ONE, "mtp_hybrid_override_pattern": "*E"},
    ),
    "Qwen3NextMTP": ("Qwen3NextForCausalLM", _ONE),
    "Qwen4ExpMTP": ("Qwen4ExpForCausalLM", {"mtp_num_hidden_layers": 1}),
    "BailingMoeV25MTPModel": ("BailingMoeV2_5ForCausalLM", _ONE),
    "BailingMoeV3MTPModel": ("BailingMoeV3ForCausalLM", _ONE),
    "ExaoneMoeMTP": ("ExaoneMoeForCausalLM", _ONE),
    "Exaone4_5_MTP": (
        "Exaone4_5_ForConditionalGeneration",
        {**_ONE, "vocab_size": VOCAB, "tie_word_embeddings": False},
    ),
    "Qwen3_5MTP": ("Qwen3_5ForConditionalGeneration", {"text_config.mtp_num_hidden_layers": 1}),
    "Qwen3_5MoeMTP": (
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config.mtp_num_hidden_layers": 1},
    ),
    "LongCatFlashMTPModel": ("LongcatFlashForCausalLM", _ONE),
    "Step3p5MTP": (
        "Step3p5ForCausalLM",
        {
            **_ONE,
            "layer_types": None,
        },
    ),
    "HYV3MTPModel": ("HYV3ForCausalLM", _ONE),
    "HYV4MTPModel": ("HYV4ForCausalLM", _ONE),
    "Glm5NextMTPModel": (
        "Glm5NextForConditionalGeneration",
        {"text_config.num_nextn_predict_layers": 1},
    ),
    "EagleMistralLarge3ForCausalLM": ("MistralLarge3ForCausalLM", {}),
}

# Those that are checkpoints of their own: with whose configuration, and what it has besides.
OWN_DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "EagleLlamaForCausalLM": ("LlamaForCausalLM", _EAGLE),
    "EagleMistralForCausalLM": ("MistralForCausalLM", _EAGLE),
    "EagleLlama4ForCausalLM": (
        "Llama4ForCausalLM",
        {
            **_EAGLE,
            "yoco_global_kv_layer": None,
            "yoco_local_kv_layer": None,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "no_rope_layers": [0] * LAYERS,
        },
    ),
    "EagleMiniCPMForCausalLM": ("MiniCPMForCausalLM", _EAGLE),
    "EagleCohereForCausalLM": ("CohereForCausalLM", _EAGLE),
    "EagleDeepSeekMTPModel": ("DeepseekV3ForCausalLM", _EAGLE),
    **{
        arch: ("LlamaForCausalLM", _EAGLE)
        for arch in (
            "Eagle3LlamaForCausalLM",
            "LlamaForCausalLMEagle3",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
            "PEagleDraftModel",
            "PeagleLlamaForCausalLM",
        )
    },
    "Eagle3Qwen3ForCausalLM": ("Qwen3ForCausalLM", _EAGLE),
    "PeagleQwen3ForCausalLM": ("Qwen3ForCausalLM", _EAGLE),
    "Eagle3DeepseekV2ForCausalLM": ("DeepseekV2ForCausalLM", _EAGLE),
    "Eagle3DeepseekV3ForCausalLM": ("DeepseekV3ForCausalLM", _EAGLE),
    "DFlashDraftModel": ("Qwen3ForCausalLM", _DFLASH),
    "DFlash2DraftModel": ("Qwen3ForCausalLM", _DFLASH),
    "LiLiCorrDraftModel": ("Qwen3ForCausalLM", _DFLASH),
    "DFlashMuseGlimmerAssistantModel": ("Qwen3ForCausalLM", _DFLASH),
    "DFlashLagunaForCausalLM": (
        "LagunaForCausalLM",
        {**_DFLASH, "mlp_layer_types": ["dense", "dense"]},
    ),
    "Qwen3DSparkModel": ("Qwen3ForCausalLM", _DFLASH),
    "Qwen3OmniDSparkModel": ("Qwen3ForCausalLM", _DFLASH),
    "Gemma4DSparkModel": (
        "Gemma4ForCausalLM",
        {
            **_DFLASH,
            "attention_k_eq_v": True,
            "layer_types": ["full_attention"] * LAYERS,
            "per_layer_config": {},
        },
    ),
    "Gemma4MTPModel": ("Gemma4ForCausalLM", {}),
    "MedusaModel": (
        "LlamaForCausalLM",
        {
            "model_type": "medusa",
            "num_heads": 2,
            "num_hidden_layers": 1,
            "truncated_vocab_size": VOCAB,
        },
    ),
}
