"""Tiny configs of every family that streams exactly: four layers (or as many as a pattern needs), windows of 5.

One entry per variant: `model_type` or `model_type/what is special`. Shapes are small and odd features are on.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

Fields = dict[str, Any]
VOCAB = 256
WINDOW = 5


def _fields(*bases: Fields, drop: tuple[str, ...] = (), **own: Any) -> Fields:
    merged: Fields = {}
    for base in (*bases, own):
        merged |= base
    return {k: v for k, v in merged.items() if k not in drop}


BASE: Fields = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = BASE | {"head_dim": 16}
GPT: Fields = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}
SLIDING: Fields = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN_WINDOW: Fields = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
GRANITE: Fields = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = EXPERTS | {"moe_intermediate_size": 32}
LOCAL_EXPERTS: Fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: Fields = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
LATENT: Fields = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LINEAR_MIX: Fields = {"layer_types": ["linear_attention", "full_attention"] * 2}
LINEAR: Fields = LINEAR_MIX | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA_HEADS: Fields = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
CONV_MIX: Fields = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
GEMMA3N: Fields = (
    HEADS
    | SLIDING
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "intermediate_size": [96] * 4,
    }
)
GEMMA4: Fields = (
    HEADS
    | SLIDING
    | {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": 32,
    }
)
FALCON: Fields = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
NO_KV = ("num_key_value_heads",)

VARIANTS: dict[str, Fields] = {
    "llama": BASE,
    "qwen2": BASE | QWEN_WINDOW,
    "qwen3": HEADS | QWEN_WINDOW,
    "mistral": _fields(BASE, sliding_window=WINDOW),
    "gemma": HEADS,
    "gemma2": _fields(HEADS, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gemma3_text": _fields(HEADS, SLIDING, query_pre_attn_scalar=16),
    "gemma3n_text": _fields(GEMMA3N, num_kv_shared_layers=0),
    "gemma3n_text/kvshare": _fields(GEMMA3N, num_kv_shared_layers=2),
    "gemma4_text": _fields(GEMMA4, num_kv_shared_layers=0),
    "gemma4_text/kvshare": _fields(GEMMA4, num_kv_shared_layers=2),
    "phi": BASE,
    "phi3": _fields(BASE, sliding_window=WINDOW),
    "gpt2": _fields(GPT, scale_attn_by_inverse_layer_idx=False),
    "gpt2/scale_idx": _fields(GPT, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": _fields(BASE, drop=NO_KV),
    "opt": _fields(BASE, drop=(*NO_KV, "intermediate_size"), ffn_dim=96, word_embed_proj_dim=64),
    "gptj": _fields(GPT, rotary_dim=8),
    "bloom": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 4, "n_head": 4},
    "gpt_bigcode": GPT,
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": BASE | SLIDING,
    "granite": BASE | GRANITE,
    "cohere": BASE,
    "cohere2": BASE | SLIDING,
    "starcoder2": _fields(BASE, sliding_window=WINDOW),
    "stablelm": BASE,
    "falcon": FALCON,
    "falcon/new_arch": _fields(FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon/alibi": _fields(FALCON, alibi=True),
    "glm": HEADS,
    "glm4": HEADS,
    "smollm3": _fields(BASE, SLIDING, use_sliding_window=True, no_rope_layers=[1, 1, 1, 0]),
    "exaone4": _fields(BASE, SLIDING, sliding_window_pattern=None),
    "ministral": HEADS | SLIDING,
    "ministral3": _fields(HEADS, sliding_window=WINDOW),
    "helium": HEADS,
    "arcee": HEADS,
    "apertus": HEADS,
    "nemotron": HEADS,
    "seed_oss": HEADS,
    "hunyuan_v1_dense": HEADS,
    "ernie4_5": HEADS,
    "vaultgemma": _fields(HEADS, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "diffllama": HEADS,
    "minicpm3": BASE | LATENT,
    "nanochat": HEADS,
    "mpt": {
        "vocab_size": VOCAB,
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "expansion_ratio": 2,
        "max_seq_len": 128,
    },
    "mixtral": _fields(BASE, sliding_window=WINDOW, num_local_experts=4),
    "qwen2_moe": _fields(BASE, SMALL_EXPERTS, QWEN_WINDOW, shared_expert_intermediate_size=32, mlp_only_layers=[0]),
    "qwen3_moe": _fields(HEADS, SMALL_EXPERTS, mlp_only_layers=[0]),
    "gpt_oss": HEADS | SLIDING | LOCAL_EXPERTS,
    "deepseek_v2": _fields(BASE, LATENT, ROUTED, n_group=2),
    "deepseek_v3": _fields(BASE, LATENT, ROUTED, n_group=2),
    "glm4_moe": _fields(HEADS, ROUTED, n_group=1),
    "olmoe": BASE | EXPERTS,
    "granitemoe": BASE | LOCAL_EXPERTS | GRANITE,
    "granitemoeshared": _fields(BASE, LOCAL_EXPERTS, shared_intermediate_size=32),
    "phimoe": BASE | LOCAL_EXPERTS,
    "dots1": _fields(HEADS, ROUTED, n_group=1, n_shared_experts=1),
    "ernie4_5_moe": _fields(
        HEADS,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
    ),
    "minimax_m2": HEADS | LOCAL_EXPERTS,
    "flex_olmo": BASE | EXPERTS,
    "hunyuan_v1_moe": _fields(HEADS, num_experts=4, moe_topk=2),
    "dbrx": {
        "vocab_size": VOCAB,
        "d_model": 64,
        "n_layers": 4,
        "n_heads": 4,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "qwen3_next": _fields(HEADS, SMALL_EXPERTS, LINEAR, shared_expert_intermediate_size=32),
    "qwen3_5_text": HEADS | LINEAR,
    "qwen3_5_moe_text": _fields(HEADS, SMALL_EXPERTS, LINEAR, shared_expert_intermediate_size=32),
    "jamba": _fields(
        BASE,
        EXPERTS,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "bamba": _fields(BASE, MAMBA_HEADS, attn_layer_indices=[1, 3]),
    "nemotron_h": _fields(
        HEADS,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        use_mamba_kernels=False,
    ),
    "falcon_h1": _fields(
        HEADS,
        MAMBA_HEADS,
        mamba_d_ssm=128,
        ssm_multipliers=[1.0, 2.0, 0.5, 1.5, 1.0],
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
    ),
    "granitemoehybrid": _fields(
        BASE, LOCAL_EXPERTS, MAMBA_HEADS, shared_intermediate_size=32, layer_types=["mamba", "attention"] * 2
    ),
    "llama4_text": _fields(
        HEADS,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=8,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
    ),
    "lfm2": _fields(BASE, CONV_MIX, block_multiple_of=8),
    "lfm2_moe": _fields(BASE, CONV_MIX, SMALL_EXPERTS, num_dense_layers=1),
    "mamba": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8},
    "mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "zamba2": _fields(
        BASE,
        num_hidden_layers=6,
        layers_block_type=["mamba", "hybrid"] * 3,
        num_mem_blocks=2,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=8,
        adapter_rank=8,
        use_mem_rope=True,
        use_mamba_kernels=False,
        num_key_value_heads=4,
    ),
    "recurrent_gemma": _fields(HEADS, num_hidden_layers=3, lru_width=64, attention_window_size=WINDOW),
    "minimax": _fields(HEADS, LOCAL_EXPERTS, LINEAR_MIX, block_size=8),
    "olmo_hybrid": _fields(HEADS, LINEAR, linear_num_key_heads=4),
    "afmoe": _fields(HEADS, SMALL_EXPERTS, SLIDING, num_dense_layers=1, num_shared_experts=1),
    "jetmoe": _fields(BASE, kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    "persimmon": BASE,
    "biogpt": _fields(BASE, drop=NO_KV),
    "codegen": _fields(GPT, rotary_dim=8),
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": WINDOW,
        "max_position_embeddings": 128,
    },
    "xglm": {
        "vocab_size": VOCAB,
        "d_model": 64,
        "num_layers": 4,
        "attention_heads": 4,
        "ffn_dim": 96,
        "max_position_embeddings": 128,
    },
}

EAGER_ONLY = frozenset({"gemma2", "bloom", "vaultgemma", "mpt", "gpt_oss", "mamba", "mamba2", "gpt_neo", "xglm"})
"""Hugging Face has no sdpa for these."""
DEFAULT = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gemma3n_text/kvshare",
    "gpt2",
    "cohere2",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "zamba2",
)
"""Run without the `slow` marker: one of each mechanism."""


def config_of(variant: str, **overrides: Any) -> PretrainedConfig:
    """A fresh config of `variant`, with `overrides` on top."""
    config: PretrainedConfig = AutoConfig.for_model(variant.split("/")[0], **(VARIANTS[variant] | overrides))
    return config


def attention_of(variant: str) -> str:
    """The implementation that most users would get."""
    return "eager" if variant in EAGER_ONLY else "sdpa"
