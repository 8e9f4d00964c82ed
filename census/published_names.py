"""How published checkpoints spell what ``save_pretrained`` writes otherwise."""

__all__ = ["RENAMES", "TRANSPOSED"]

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
    "HYV4ForCausalLM": [
        (r"mlp\.(shared_experts\.)?linear_gate", r"mlp.\1gate_proj"),
        (r"hc_pre\.(hc_attn_layer|hc_mlp_layer)\.", r"\1.hc_pre."),
        (r"hc_pre\.hc_head\.", "hc_head."),
    ],
}


# Tensors that published checkpoints hold with the last two dimensions swapped.
TRANSPOSED: dict[str, str] = {
    "Qwen3VLMoeForConditionalGeneration": r"experts\.(gate_up|down)_proj$"
}
