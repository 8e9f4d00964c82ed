"""Configurations of multimodal architectures that transformers does not have."""

from typing import Any

from census.sizes import HEAD_DIM, HEADS, HIDDEN, INTER, KV_HEADS, LAYERS, VOCAB
from census.vllm_only_parts import BASE, VIT

__all__ = ["MULTIMODAL_CONFIGS"]

_QWEN2 = {**BASE, "model_type": "qwen2"}
_QWEN3 = {**BASE, "model_type": "qwen3"}
_VISION: dict[str, Any] = {
    **VIT,
    "num_channels": 3,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}

# By architecture; each is laid over `census.vllm_only_parts.BASE`.
MULTIMODAL_CONFIGS: dict[str, dict[str, Any]] = {
    "DotsOCRForCausalLM": {
        "model_type": "dots_ocr",
        "vision_config": {
            **_VISION,
            "embed_dim": HIDDEN,
            "temporal_patch_size": 1,
            "rms_norm_eps": 1e-5,
            "use_bias": False,
            "post_norm": True,
        },
    },
    "Phi3VForCausalLM": {
        "img_processor": {
            "name": "clip_vision_model",
            "layer_idx": -23,
            "image_dim_out": 1024,
            "num_img_tokens": 144,
        },
        "embd_layer": {
            "use_hd_transform": True,
            "with_learnable_separator": True,
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
        },
    },
    "PixtralForConditionalGeneration": {
        "text_config": {
            **BASE,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
        },
        "vision_config": {
            **VIT,
            "num_channels": 3,
            "rope_theta": 10000.0,
            "image_token_id": 5,
            "adapter_bias": True,
        },
    },
    "KeyeForConditionalGeneration": {"vision_config": _VISION},
    "KeyeVL1_5ForConditionalGeneration": {"vision_config": _VISION},
    "Eagle2_5_VLForConditionalGeneration": {
        "text_config": {**_QWEN2, "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": _SIGLIP,
        "downsample_ratio": 0.5,
        "select_layer": -1,
        "force_image_size": 56,
    },
    "IsaacForConditionalGeneration": {
        "model_type": "isaac",
        "text_config": _QWEN3,
        "vision_config": {**_VISION, "num_patches": 16, "pixel_shuffle_scale_factor": 2},
    },
    "UltravoxModel": {
        "model_type": "ultravox",
        "text_config": {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "audio_config": {
            "model_type": "whisper",
            "d_model": HIDDEN,
            "encoder_layers": LAYERS,
            "encoder_attention_heads": HEADS,
            "encoder_ffn_dim": INTER,
            "num_mel_bins": 16,
            "max_source_positions": 64,
        },
        "hidden_size": HIDDEN,
        "stack_factor": 2,
        "projector_act": "swiglu",
        "projector_ln_mid": True,
    },
    "MiDashengLMModel": {
        "model_type": "midashenglm",
        "text_config": {**BASE, "model_type": "qwen2_5_omni_text"},
        "audio_encoder_config": {
            "embed_dim": HIDDEN,
            "depth": LAYERS,
            "num_heads": HEADS,
            "outputdim": 16,
            "n_mels": 16,
            "target_length": 64,
        },
        "subsample_factor": 5,
    },
    "InternS1ForConditionalGeneration": {
        "text_config": {**_QWEN3, "architectures": ["Qwen3ForCausalLM"]},
        "vision_config": {
            **_VISION,
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "attention_bias": True,
            "use_qk_norm": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_absolute_position_embeddings": True,
            "layer_scale_init_value": 0.1,
            "norm_type": "layer_norm",
        },
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
    },
    "GLM4VForCausalLM": {
        "model_type": "chatglm",
        "num_layers": LAYERS,
        "padded_vocab_size": VOCAB,
        "ffn_hidden_size": INTER,
        "kv_channels": HEAD_DIM,
        "multi_query_attention": True,
        "multi_query_group_num": KV_HEADS,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "rmsnorm": True,
        "post_layer_norm": True,
        "layernorm_epsilon": 1e-5,
        "original_rope": True,
        "seq_length": 512,
        "boi_token_id": 3,
        "eoi_token_id": 4,
        "vision_config": {
            **_VISION,
            "num_heads": HEADS,
            "num_positions": 17,
            "dropout_prob": 0.0,
            "scaling_factor": 8,
            "hidden_act": "gelu",
        },
    },
    "OpenPanguVLForConditionalGeneration": {
        "vision_config": {
            **_VISION,
            "depth": LAYERS,
            "num_heads": HEADS,
            "out_hidden_size": HIDDEN,
            "window_size": 28,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
        },
    },
}
