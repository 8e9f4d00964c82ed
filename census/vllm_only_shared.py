"""Architectures that only vLLM has, each with the configuration of another and a little besides."""

from typing import Any

from census.sizes import HIDDEN, INTER, LAYERS

__all__ = ["SHARED_CONFIGS"]

_INTERN_VIT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "qk_normalization": True,
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
    "initializer_factor": 1.0,
    "hidden_act": "gelu",
    "model_type": "intern_vit_6b",
}
_INTERN: dict[str, Any] = {
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "select_layer": -1,
    "force_image_size": 56,
    "use_thumbnail": True,
    "dynamic_image_size": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 2,
    "vision_config": _INTERN_VIT,
}

# By architecture: whose configuration, and what it has besides; dots reach into sub-configurations.
SHARED_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "OpenCUAForConditionalGeneration": ("Qwen2_5_VLForConditionalGeneration", {}),
    "InternS1ProForConditionalGeneration": ("Qwen3VLMoeForConditionalGeneration", {}),
    "KimiK25ForConditionalGeneration": (
        "Kimi_K25ForConditionalGeneration",
        {"tie_word_embeddings": False, "text_config.tie_word_embeddings": False},
    ),
    "LightOnOCRForConditionalGeneration": (
        "LightOnOcrForConditionalGeneration",
        {
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
        },
    ),
    "JinaEmbeddingsV5Model": ("Qwen3ForCausalLM", {}),
    "JinaForRanking": ("Qwen3ForCausalLM", {}),
    "DeepseekV41ForCausalLM": ("DeepseekV4ForCausalLM", {"model_type": "deepseek_v41"}),
    "BeeForConditionalGeneration": ("LlavaOnevisionForConditionalGeneration", {}),
    **{
        arch: (base, {**_INTERN, "@text": base})
        for arch, base in {
            "InternVLChatModel": "Qwen2ForCausalLM",
            "H2OVLChatModel": "MistralForCausalLM",
            "SkyworkR1VChatModel": "Qwen2ForCausalLM",
            "NVLM_D": "Qwen2ForCausalLM",
        }.items()
    },
}
