"""How published checkpoints spell what ``save_pretrained`` writes otherwise."""

from census.sizes import HIDDEN

__all__ = ["ADDED", "RENAMES", "TRANSPOSED"]

# Names that save_pretrained writes but published checkpoints spell otherwise:
# (regular expression, replacement); an empty result drops the tensor.
_VISION = [
    (
        r"vision_tower\.(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.",
        r"vision_tower.vision_model.\1.",
    )
]
_W123 = [
    (r"(experts\.\d+\.)gate_proj", r"\1w1"),
    (r"(experts\.\d+\.)up_proj", r"\1w3"),
    (r"(experts\.\d+\.)down_proj", r"\1w2"),
]
_MTP = [(r"\.mtp_block\.", ".")]
_GTE_NEW = [
    (r"^model\.", ""),
    (r"\.layers\.", ".layer."),
    (r"attn\.qkv_proj", "attention.qkv_proj"),
    (r"attn\.out_proj", "attention.o_proj"),
    (r"mlp\.gate_up_proj", "mlp.up_gate_proj"),
]
_BARE = [(r"^model\.", "")]
RENAMES: dict[str, list[tuple[str, str]]] = {
    "PhiMoEForCausalLM": _W123,
    "Step3p5ForCausalLM": [(r"\.moe\.share_expert\.", ".share_expert.")],
    "IQuestLoopCoderForCausalLM": [(r"(gate_projections\.\d+)\.gate_proj", r"\1")],
    "DeepseekV4ForCausalLM": [*_W123, (r"^lm_head", "head")],
    "KimiLinearForCausalLM": _W123,
    "*": [(r"language_model\.model\.model\.", "language_model.model.")],
    "Cohere2VisionForConditionalGeneration": _VISION,
    "Gemma3ForConditionalGeneration": _VISION,
    "LlavaForConditionalGeneration": _VISION,
    "LlavaNextForConditionalGeneration": _VISION,
    "LlavaNextVideoForConditionalGeneration": _VISION,
    "LlavaOnevisionForConditionalGeneration": _VISION,
    "PaliGemmaForConditionalGeneration": _VISION,
    "Lfm2VlForConditionalGeneration": [
        (
            r"vision_tower\.(embeddings|encoder|post_layernorm|head)\.",
            r"vision_tower.vision_model.\1.",
        )
    ],
    "Glm5NextForCausalLM": [(r"^model\.language_model\.", "model."), (r"^model\.visual\..*", "")],
    "OlmoHybridForCausalLM": [
        (r"attention_layer_norm", "input_layernorm"),
        (r"feedforward_layer_norm", "post_attention_layernorm"),
    ],
    "LongcatFlashForCausalLM": [(r".*mlp\.experts\.[89]\..*", "")],
    "ColPaliForRetrieval": _VISION,
    "ColBERTLfm2Model": [(r"^model\.", ""), (r"short_conv", "conv")],
    "LlamaModel": [(r"^", "model.")],
    "LlamaBidirectionalModel": [(r"^", "model.")],
    "MistralModel": [(r"^", "model.")],
    "Qwen2Model": [(r"^", "model.")],
    "Gemma2Model": [(r"^", "model.")],
    **dict.fromkeys(
        "DeepSeekMTPModel DeepseekV32MTPModel OpenPanguMTPModel MiMoMTPModel Glm4MoeMTPModel"
        " Glm4MoeLiteMTPModel GlmOcrMTPModel HYV3MTPModel Glm5NextMTPModel Step3p5MTP".split(),
        _MTP,
    ),
    **dict.fromkeys(
        "EagleLlamaForCausalLM Eagle3LlamaForCausalLM LlamaForCausalLMEagle3"
        " Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM"
        " EagleDeepSeekMTPModel PEagleDraftModel PeagleLlamaForCausalLM Eagle3Qwen3ForCausalLM"
        " PeagleQwen3ForCausalLM"
        " Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM EagleLlama4ForCausalLM"
        " DFlashDraftModel DFlash2DraftModel LiLiCorrDraftModel DFlashMuseGlimmerAssistantModel"
        " DFlashLagunaForCausalLM Qwen3DSparkModel Qwen3OmniDSparkModel Gemma4DSparkModel".split(),
        _BARE,
    ),
    "GteNewModel": _GTE_NEW,
    "GteNewForSequenceClassification": [*_GTE_NEW, (r"^(embeddings|encoder)", r"new.\1")],
    "JinaEmbeddingsV5Model": _BARE,
    "ColBERTJinaRobertaModel": [
        (r"embeddings\.LayerNorm", "emb_ln"),
        (r"attn\.qkv_proj", "mixer.Wqkv"),
        (r"attn\.out_proj", "mixer.out_proj"),
        (r"attn_ln", "norm1"),
        (r"mlp\.up_proj", "mlp.fc1"),
        (r"mlp\.down_proj", "mlp.fc2"),
        (r"mlp_ln", "norm2"),
    ],
    "PixtralForConditionalGeneration": [(r"^(model\.)?language_model\.", r"\1")],
    "UltravoxModel": [(r"\.mlp\.(fc[12])", r".\1")],
    "LongCatFlashMTPModel": [
        (r"mtp_block\.mlp\.", "mtp_block.transformer_layer.mlp."),
        (r"^model\.layers\.\d+\.final_layernorm", "model.mtp.norm"),
        (r"^model\.layers\.\d+\.([eh]norm)", r"model.mtp.layers.0.\1.m"),
        (r"^model\.layers\.\d+\.(mtp_block\.)?", "model.mtp.layers.0."),
        (r"^model\.embed_tokens", "model.mtp.embed_tokens"),
    ],
    "NemotronHMTPModel": [(r"^model\.layers", "mtp.layers")],
    "HYV4ForCausalLM": [
        (r"mlp\.(shared_experts\.)?linear_gate", r"mlp.\1gate_proj"),
        (r"hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r"\1.hc_pre."),
        (r"hc_pre\.hc_head\.", "hc_head."),
    ],
}


# Tensors of published checkpoints that lie beside those of save_pretrained.
ADDED: dict[str, dict[str, tuple[int, ...]]] = {
    "BgeM3EmbeddingModel": {
        "sparse_linear.weight": (1, HIDDEN),
        "sparse_linear.bias": (1,),
        "colbert_linear.weight": (HIDDEN, HIDDEN),
        "colbert_linear.bias": (HIDDEN,),
    },
    "JinaVLForRanking": {
        "score.0.weight": (HIDDEN, HIDDEN),
        "score.0.bias": (HIDDEN,),
        "score.2.weight": (1, HIDDEN),
        "score.2.bias": (1,),
    },
}

# Tensors that published checkpoints hold with the last two dimensions swapped.
TRANSPOSED: dict[str, str] = {
    "Qwen3VLMoeForConditionalGeneration": r"experts\.(gate_up|down)_proj$"
}
