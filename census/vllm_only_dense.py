"""Configurations of dense architectures that transformers does not have."""

from typing import Any

from census.sizes import HEAD_DIM, HEADS, HIDDEN, INTER, KV_HEADS, LAYERS, POSITIONS, VOCAB

__all__ = ["DENSE_CONFIGS"]

_GTE: dict[str, Any] = {
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "position_embedding_type": "rope",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "num_labels": 1,
}

# By architecture; each is laid over `census.vllm_only_parts.BASE`.
DENSE_CONFIGS: dict[str, dict[str, Any]] = {
    "ChatGLMModel": {
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
        "seq_length": POSITIONS,
    },
    **dict.fromkeys(("GteNewModel", "GteNewForSequenceClassification"), _GTE),
    "ColBERTJinaRobertaModel": {
        **_GTE,
        "position_embedding_type": "rotary",
        "colbert_dim": 32,
        "lora_alpha": 1,
        "lora_rank": 4,
    },
    "ExaoneForCausalLM": {
        "num_layers": LAYERS,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-5,
    },
    "InternLM2ForCausalLM": {"bias": False},
    "InternLM3ForCausalLM": {"bias": False, "qkv_bias": False},
    "IQuestCoderForCausalLM": {},
    "IQuestLoopCoderForCausalLM": {"loop_num": 2, "loop_window_size": 64},
    "MiniCPMForCausalLM": {
        "scale_emb": 12,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "num_experts": 0,
    },
    "MiMoForCausalLM": {"num_nextn_predict_layers": 1, "attention_bias": True},
    "OrionForCausalLM": {},
    "PanguEmbeddedForCausalLM": {"bias": True},
    "Plamo3ForCausalLM": {
        "interleaved_sliding_window": [64, None],
        "rope_local_theta": 10000.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Rnj1ForCausalLM": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "final_logit_softcapping": 30.0,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": False,
        "model_type": "gemma3_text",
    },
    "Step1ForCausalLM": {},
    "SolarForCausalLM": {
        "bskcn_1": [0],
        "bskcn_2": [0],
        "bskcn_3": [1],
        "bskcn_4": [1],
        "bskcn_tv": [0.9, 0.8],
    },
    "TeleChat2ForCausalLM": {
        "n_layer": LAYERS,
        "n_head": HEADS,
        "ffn_hidden_size": INTER,
        "layer_norm_epsilon": 1e-5,
    },
    "TeleChat3ForCausalLM": {},
    "TeleFLMForCausalLM": {
        "use_mup": True,
        "mup_scale_factor": 1.0,
        "output_mult": 1.0,
        "input_mult": 1.0,
    },
    "HF_ColBERT": {"model_type": "bert", "colbert_dim": 32, "hidden_act": "gelu"},
    "ColBERTModernBertModel": {"model_type": "modernbert", "colbert_dim": 32},
    "ColBERTLfm2Model": {
        "model_type": "lfm2",
        "colbert_dim": 32,
        "layer_types": ["conv", "full_attention"],
        "conv_dim": HIDDEN,
        "conv_dim_out": HIDDEN,
        "block_dim": HIDDEN,
        "block_ff_dim": INTER,
        "block_auto_adjust_ff_dim": False,
    },
    "Qwen2ForRewardModel": {"model_type": "qwen2", "num_labels": 1},
    "Qwen2ForProcessRewardModel": {"model_type": "qwen2", "num_labels": 2},
    "InternLM2ForRewardModel": {"bias": False, "num_labels": 1},
    "VoyageQwen3BidirectionalEmbedModel": {"model_type": "qwen3", "num_labels": 64},
}
