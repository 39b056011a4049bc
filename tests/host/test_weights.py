from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

from host.host_configs import FAMILIES, SMALL
from host.host_tiny import anatomy_of, loaded, meta_model, run_alone, saved, state_of
from megatrain.errors import ModelError
from megatrain.host import weights
from megatrain.host.store import HostStore
from megatrain.host.weights import load_pretrained


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("streamed", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_are_what_transformers_loads(family: str, streamed: torch.dtype, tmp_path: Path) -> None:
    saved(FAMILIES[family](), tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    store, _ = loaded(tmp_path, streamed=streamed)
    state = state_of(store)
    assert set(state) == set(expected)
    different = [n for n, t in expected.items() if not torch.equal(state[n], t.to(state[n].dtype))]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_source_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(FAMILIES["qwen3_moe"](), tmp_path, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for streamed in (torch.float32, torch.bfloat16):
        state = state_of(loaded(tmp_path, streamed=streamed)[0])
        assert [n for n, t in expected.items() if not torch.equal(state[n], t)] == []


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], *, family: str = "llama") -> None:
    """Save a family's model and rewrite its tensors."""
    saved(FAMILIES[family](), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"


def with_value(value: float, *, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM] = tensors[NORM].to(dtype)
        tensors[NORM][5] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks {NORM}"),
        (lambda t: t.update(extra=torch.zeros(3)), "does not know: extra"),
        (lambda t: t.update({NORM: torch.zeros(33)}), f"another shape: {NORM} (33,) instead of (32,)"),
        (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)}), f"quantised ({NORM} is stored as int8)"),
        (lambda t: t.update({NORM: torch.zeros(32).to(torch.float8_e4m3fn)}), "quantised"),
        (with_value(float("nan"), dtype=torch.float32), f"{NORM} is not finite: element 5 is nan"),
        (with_value(float("inf"), dtype=torch.bfloat16), f"{NORM} is not finite: element 5 is inf"),
        (with_value(float("-inf"), dtype=torch.float16), f"{NORM} is not finite: element 5 is -inf"),
        (with_value(3.4028e38, dtype=torch.float32), f"{NORM} is infinite in bf16: element 5 is 3.40"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    changed(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        loaded(tmp_path, streamed=torch.bfloat16)
    assert message in caught.value.message
    assert caught.value.where
    assert caught.value.hint


def test_an_fp32_store_takes_what_bf16_cannot(tmp_path: Path) -> None:
    changed(tmp_path, with_value(3.4e38, dtype=torch.float32))
    assert state_of(loaded(tmp_path, streamed=torch.float32)[0])[NORM][5] == torch.tensor(3.4e38)


def test_a_bad_expert_is_named_as_in_the_file(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    changed(tmp_path, lambda t: t[name].fill_(float("nan")), family="qwen3_moe")
    with pytest.raises(ModelError, match=name):
        loaded(tmp_path, streamed=torch.bfloat16)


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    changed(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(96, 32)}), family="llama-tied")
    with pytest.raises(ModelError, match="ties") as caught:
        loaded(tmp_path, streamed=torch.float32)
    assert "tie_word_embeddings: false" in str(caught.value.hint)


def test_a_tied_tensor_under_its_other_name(tmp_path: Path) -> None:
    changed(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}), family="llama-tied")
    state = state_of(loaded(tmp_path, streamed=torch.bfloat16)[0])
    assert torch.equal(state["lm_head.weight"], load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_a_checkpoint_of_the_base_model_without_its_prefix(tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    changed(tmp_path, strip, family="llama-tied")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    state = state_of(loaded(tmp_path, streamed=torch.bfloat16)[0])
    assert [n for n, t in expected.items() if not torch.equal(state[n], t)] == []


def test_quantised_configs_are_refused(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "fp8"}
    model = meta_model(FAMILIES["llama"]())
    store = HostStore.allocate(anatomy_of(model), pin=False, threads=1)
    model.config = config
    with pytest.raises(ModelError, match="quantised"):
        load_pretrained(store, source=tmp_path, meta_model=model)


def test_pieces_smaller_than_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut of every tensor into pieces gives the same bits."""
    saved(FAMILIES["qwen3_moe"](), tmp_path)
    expected = state_of(loaded(tmp_path, streamed=torch.bfloat16)[0])
    for piece_bytes in (52, 1000):
        monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
        state = state_of(loaded(tmp_path, streamed=torch.bfloat16)[0])
        assert [n for n, t in expected.items() if not torch.equal(state[n], t)] == []


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path)
    seen: list[tuple[int, int]] = []
    model = meta_model(FAMILIES["llama"]())
    store = HostStore.allocate(anatomy_of(model), pin=False, threads=1)
    load_pretrained(store, source=tmp_path, meta_model=model, progress=lambda done, total: seen.append((done, total)))
    total = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_peak_memory_is_the_steady_state(tmp_path: Path) -> None:
    """In a process of its own: loading and exporting add a few MiB to the store, whatever its size."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 8192}
    config = MixtralConfig(**(SMALL | wide), num_local_experts=4)
    saved(config, tmp_path / "source", dtype=torch.float32)
    script = f"""
        import re, torch
        from pathlib import Path
        from host.host_tiny import anatomy_of, meta_model
        from megatrain.host.export import export_model
        from megatrain.host.store import HostStore
        from megatrain.host.weights import load_pretrained
        from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig
        def kib(what):
            return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))
        source, first = Path({str(tmp_path / "source")!r}), Path({str(tmp_path / "first")!r})
        tiny = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                             num_key_value_heads=1, vocab_size=8, num_local_experts=2)
        for config in (tiny, AutoConfig.from_pretrained(source)):  # the first brings the code itself into memory
            if config is tiny:
                AutoModelForCausalLM.from_config(tiny).save_pretrained(first)
            model = meta_model(config, dtype=torch.bfloat16)
            store = HostStore.allocate(anatomy_of(model, streamed=torch.bfloat16), pin=False, threads=2)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
            steady = kib("VmRSS")
            folder = first if config is tiny else source
            load_pretrained(store, source=folder, meta_model=model, threads=2)
            export_model(store, Path({str(tmp_path / "out")!r}), meta_model=model, source=folder, threads=2)
        print(kib("VmHWM") - steady, store.report.total_bytes >> 10)
    """
    out = run_alone(script)
    above_kib, store_kib = int(out[-2]), int(out[-1])
    assert store_kib > 300 << 10
    assert above_kib < 64 << 10
