"""One tiny configuration per way of keeping weights: tied, Conv1D, experts apart or fused, buffers, other prefixes."""

from __future__ import annotations

from collections.abc import Callable

from transformers import (
    DbrxConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeConfig,
    JambaConfig,
    JetMoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "phi3": lambda: Phi3Config(**SMALL),
    "gpt2": lambda: GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    ),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=8),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8),
    "olmoe": lambda: OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**SMALL, num_local_experts=4, head_dim=8),
    "granitemoe": lambda: GraniteMoeConfig(**SMALL, num_local_experts=4),
    "jetmoe": lambda: JetMoeConfig(**(SMALL | {"kv_channels": 8, "num_local_experts": 4})),
    "dbrx": lambda: DbrxConfig(
        vocab_size=96, d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "jamba": lambda: JambaConfig(
        **SMALL, num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=8, use_mamba_kernels=False,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}), n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
