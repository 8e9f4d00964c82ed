"""What the small configurations of multimodal models need beyond small sizes."""

from typing import Any

from census.sizes import EXPERTS, HEAD_DIM, HEADS, HIDDEN, INTER, MOE_INTER, VOCAB

__all__ = ["MULTIMODAL_OVERRIDES"]

# By architecture; dots reach into sub-configurations. "@text": another architecture whose entry
# also applies, inside text_config. A key that begins with "json:" is only written to config.json.
MULTIMODAL_OVERRIDES: dict[str, dict[str, Any]] = {
    "HunYuanVLForConditionalGeneration": {"text_config.head_dim": HEAD_DIM},
    "Cosmos3EdgeForConditionalGeneration": {
        "text_config.rope_parameters.mrope_section": [8, 4, 4],
        "projector_hidden_size": 4 * HIDDEN,
        "json:projector_config": {"merger_intermediate_size": 4 * HIDDEN},
    },
    "CohereCompassForConditionalGeneration": {
        "text_config.rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 6, 4],
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 6, 4],
            },
        },
        "text_config.layer_types": ["sliding_attention", "full_attention"],
        "vision_config.deepstack_visual_indexes": [0],
        "vision_config.out_hidden_size": HIDDEN,
        "tie_word_embeddings": True,
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config.moe_intermediate_size": [MOE_INTER, MOE_INTER],
        "text_config.rope_parameters.mrope_section": [6, 6, 4],
        "text_config.moe_num_experts": EXPERTS,
        "json:vision_config.embed_dim": HIDDEN,
        "json:vision_config.mlp_ratio": INTER / HIDDEN,
        "json:pixel_hidden_size": HIDDEN,
        "json:hidden_size": HIDDEN,
        "json:spatial_conv_size": 2,
        "json:temporal_conv_size": 2,
        "json:use_temporal_conv": True,
        "json:im_patch_id": 100,
        "json:rms_norm_eps": 1e-5,
        "json:vocab_size": VOCAB,
    },
    "Glm4vMoeForConditionalGeneration": {
        "text_config.head_dim": HEAD_DIM,
        "text_config.use_qk_norm": False,
    },
    "Glm5NextForConditionalGeneration": {
        "text_config.qk_rope_head_dim": 0,
        "text_config.linear_head_dim": 32,
        "text_config.linear_num_heads": 4,
        "text_config.mhc": True,
        "text_config.mla_use_nope": True,
        "text_config.indexer_rope_interleave": False,
        "text_config.topk_method": "noaux_tc",
        "text_config.scoring_func": "sigmoid",
    },
    "Lfm2VlForConditionalGeneration": {
        "@text": "Lfm2ForCausalLM",
        "vision_config.vision_use_head": False,
    },
    "Gemma3nForConditionalGeneration": {"@text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {
        "@text": "Gemma4ForCausalLM",
        "vision_config": {
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "position_embedding_size": 64,
        },
    },
    "DiffusionGemmaForBlockDiffusion": {"@text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {
        "@text": "Gemma4ForCausalLM",
        "vision_config": {},
        "text_config.hidden_size_per_layer_input": 0,
    },
    "EmbeddingGemma2Model": {
        "text_config.per_layer_config": {"1": {"head_dim": 64, "num_key_value_heads": 1}},
        "text_config.hidden_size_per_layer_input": 32,
    },
    "Qwen4ExpForConditionalGeneration": {
        "@text": "Qwen4ExpForCausalLM",
        "json:vision_config.deepstack_visual_indexes": [],
        "vision_config.out_hidden_size": HIDDEN,
    },
    "Qwen3VLMoeForConditionalGeneration": {"text_config.norm_topk_prob": True},
    "Qwen3OmniMoeForConditionalGeneration": {
        "talker_config.text_config.shared_expert_intermediate_size": MOE_INTER,
        "talker_config.spatial_merge_size": 2,
        "json:thinker_config.vision_config.image_size": 56,
        "thinker_config.vision_config.num_position_embeddings": 16,
        "thinker_config.vision_config.out_hidden_size": HIDDEN,
        "json:thinker_config.text_config.tie_word_embeddings": False,
        "json:thinker_config.vision_config.apply_vit_abs_pos_embed": True,
    },
    "MuseGlimmerForConditionalGeneration": {
        "out_hidden_size": 4 * HIDDEN,
        "json:vision_config.output_dim": 4 * HIDDEN,
        "json:vision_config.adapter_dim": HIDDEN,
    },
    "QianfanOCRForConditionalGeneration": {
        "vision_config.image_size": [56, 56],
        "vision_config.patch_size": [14, 14],
        "json:vision_config.image_size": 56,
        "json:vision_config.patch_size": 14,
        "json:force_image_size": None,
        "json:ps_version": "v2",
    },
    "VoxtralForConditionalGeneration": {"audio_config.downsample_factor": 4},
    "Granite4VisionForConditionalGeneration": {"text_config.model_type": "granitemoehybrid"},
    "Cohere2VisionForConditionalGeneration": {"vision_config.vision_use_head": False},
    "Gemma3ForConditionalGeneration": {"vision_config.vision_use_head": False},
}
