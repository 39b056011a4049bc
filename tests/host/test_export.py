from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from host.host_configs import FAMILIES
from host.host_tiny import anatomy_of, loaded, meta_model, run_alone, saved, state_of
from megatrain.errors import DiskError, ModelError, UsageError
from megatrain.host import draws, export
from megatrain.host.export import export_model
from megatrain.host.initial import init_random
from megatrain.host.store import HostStore

KJV_TINY = Path(__file__).parents[2] / "src" / "megatrain" / "assets" / "kjv-tiny"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "streamed", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=["fp32", "bf16"]
)
def test_untouched_model_comes_back_bit_by_bit(family: str, streamed: torch.dtype, tmp_path: Path) -> None:
    saved(FAMILIES[family](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=streamed)
    done = export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert list(after) == list(before)
    assert [n for n, t in before.items() if not (torch.equal(after[n], t) and after[n].dtype is t.dtype)] == []
    assert done.total_bytes == sum(t.nbytes for t in before.values())
    assert (done.shards, done.dtype) == (1, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_source_it_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    saved(FAMILIES[family](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    export_model(store, tmp_path / "out", meta_model=model, source=None)
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert set(after) == set(before)
    assert [n for n, t in before.items() if not torch.equal(after[n], t)] == []
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    expected = state_of(store)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in reloaded.state_dict().items())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("streamed", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_export_dtype_and_config_agree(dtype: str, streamed: torch.dtype, tmp_path: Path) -> None:
    saved(FAMILIES["qwen3_moe"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=streamed)
    done = export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source", dtype=dtype)  # type: ignore[arg-type]
    wanted = export.DTYPES[dtype]
    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert {t.dtype for t in after.values()} == {wanted}
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype is wanted
    assert done.total_bytes == sum(t.numel() for t in before.values()) * wanted.itemsize
    for name, exact in before.items():
        if dtype == "bf16":
            bits = ((exact.view(torch.int32).long() + 0x8000) >> 16).to(torch.int16)  # half away from zero
            assert torch.equal(after[name].view(torch.int16), bits)
        else:
            assert torch.equal(after[name], exact.to(wanted))


def test_a_trained_bf16_store_exports_its_streamed_halves(tmp_path: Path) -> None:
    saved(FAMILIES["llama-tied"](), tmp_path / "source", dtype=torch.bfloat16)
    store, model = loaded(tmp_path / "source", streamed=torch.bfloat16)
    entry = store.stem.unit.layout.params[0]
    store.stem.set_master(entry, store.stem.master(entry) * 1.01)
    export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    after = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in after
    assert torch.equal(after["model.embed_tokens.weight"], store.stem.streamed(entry))
    before = tensors_of(tmp_path / "source")
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_shards_and_index(tmp_path: Path) -> None:
    saved(FAMILIES["mixtral"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    done = export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    after = tensors_of(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values()) == done.total_bytes
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in after.values())
    assert len(set(index["weight_map"].values())) == done.shards > 3
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as content:
            assert name in content.keys()  # noqa: SIM118  # not a mapping
    before = tensors_of(tmp_path / "source")
    assert all(torch.equal(after[n], t) for n, t in before.items())
    again, _ = loaded(tmp_path / "out", streamed=torch.float32)  # and the sharded folder is a source
    assert all(torch.equal(t, state_of(store)[n]) for n, t in state_of(again).items())


def test_both_copies_of_a_tied_tensor_stay_when_the_source_has_both(tmp_path: Path) -> None:
    saved(FAMILIES["llama-tied"](), tmp_path / "source")
    before = tensors_of(tmp_path / "source")
    before["lm_head.weight"] = before["model.embed_tokens.weight"].clone()
    save_file(before, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    entry = store.stem.unit.layout.params[0]
    store.stem.set_master(entry, store.stem.master(entry) + 1)
    export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    after = tensors_of(tmp_path / "out")
    assert set(after) == set(before)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"] + 1)
    assert torch.equal(after["model.embed_tokens.weight"], after["lm_head.weight"])


def test_keys_that_transformers_ignores_are_kept_as_they_are(tmp_path: Path) -> None:
    saved(FAMILIES["deepseek_v3"](), tmp_path / "source")
    before = tensors_of(tmp_path / "source")
    before["model.layers.61.eh_proj.weight"] = torch.randn(5, 3).bfloat16()  # multi-token prediction, not trained
    save_file(before, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    store, model = loaded(tmp_path / "source", streamed=torch.bfloat16)
    export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source", dtype="fp32")
    after = tensors_of(tmp_path / "out")
    assert set(after) == set(before)
    assert torch.equal(after["model.layers.61.eh_proj.weight"], before["model.layers.61.eh_proj.weight"])


def test_vocabulary_padding_rows_survive(tmp_path: Path) -> None:
    """The model has 96 rows; that a tokenizer knows fewer is nobody's business here."""
    saved(FAMILIES["qwen2"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.bfloat16)
    export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    assert tensors_of(tmp_path / "out")["model.embed_tokens.weight"].shape == (96, 32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 96


def test_config_keeps_what_the_source_says_and_takes_overrides(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    content = json.loads(path.read_text()) | {"a_note": {"of": "the author"}, "transformers_version": "4.1.0"}
    path.write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(tmp_path / "source")
    config.max_position_embeddings = 4096
    store, _ = loaded(tmp_path / "source", streamed=torch.float32)
    model, source = meta_model(config), tmp_path / "source"
    export_model(store, tmp_path / "out", meta_model=model, source=source, save_tokenizer=lambda d: (d / "t").touch())
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after == content | {"max_position_embeddings": 4096}
    assert (tmp_path / "out" / "t").exists()


def test_generation_config_that_transformers_refuses_is_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(FAMILIES["llama"](), tmp_path / "source")
    odd = '{"do_sample": false, "temperature": 0.3, "top_p": -2.0}'
    (tmp_path / "source" / "generation_config.json").write_text(odd)
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    assert (tmp_path / "out" / "generation_config.json").read_text() == odd
    assert "generation_config.json is copied as it is" in caplog.text


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    before = os.umask(0o027)
    try:
        export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "out" / "config.json").stat().st_mode) == 0o640


def test_a_failed_export_leaves_the_earlier_one(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    entry = store.stem.unit.layout.params[0]
    store.stem.set_master(entry, store.stem.master(entry) + 1)

    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="No space left"):
        export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source", save_tokenizer=fail)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != content


def test_no_foreign_folder_is_overwritten(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").touch()
    for folder in ("home", "source", "home/letters.txt"):
        with pytest.raises(UsageError):
            export_model(store, tmp_path / folder, meta_model=model, source=tmp_path / "source")
    assert (tmp_path / "home" / "letters.txt").exists()


def test_fp16_that_overflows_is_refused_by_name(tmp_path: Path) -> None:
    saved(FAMILIES["llama"](), tmp_path / "source")
    store, model = loaded(tmp_path / "source", streamed=torch.float32)
    entry = store.stem.unit.layout.params[0]
    store.stem.set_master(entry, torch.full(entry.shape, 70000.0))
    with pytest.raises(ModelError, match=r"embed_tokens.*fp16"):
        export_model(store, tmp_path / "out", meta_model=model, source=tmp_path / "source", dtype="fp16")


def test_kjv_tiny_in_a_fresh_process(tmp_path: Path) -> None:
    store, model = loaded(KJV_TINY, streamed=torch.float32)
    export_model(store, tmp_path / "out", meta_model=model, source=KJV_TINY)
    script = f"""
        import torch
        from transformers import AutoModelForCausalLM
        ids = torch.arange(40).view(2, 20)
        ours, info = AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, output_loading_info=True)
        assert not any(info.values()), info
        theirs = AutoModelForCausalLM.from_pretrained({str(KJV_TINY)!r})
        assert ours.dtype is theirs.dtype
        with torch.no_grad():
            assert torch.equal(ours(ids).logits, theirs(ids).logits)
    """
    run_alone(script)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "qwen3_moe", "jamba", "deepseek_v3", "gpt_oss"])
def test_random_init_is_the_architectures_own(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    model = meta_model(config, dtype=torch.bfloat16)
    stores = []
    for seed in (3, 3, 4):
        torch.manual_seed(11)
        store = HostStore.allocate(anatomy_of(model, streamed=torch.bfloat16), pin=False, threads=1)
        init_random(store, meta_model=model, seed=seed)
        assert torch.initial_seed() == 11
        stores.append(state_of(store))
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    assert set(stores[0]) == set(reference)
    differ = []
    for name, expected in reference.items():
        drawn, again, other = (state[name] for state in stores)
        assert torch.equal(drawn, again)
        if not torch.equal(drawn, other):
            differ.append(name)
        spread = expected.float().std(correction=0).item()
        if spread == 0.0:  # ones of norms, zeros of biases
            assert torch.equal(drawn, expected.to(drawn.dtype)), name
        elif expected.numel() >= 64:
            assert drawn.float().std(correction=0).item() == pytest.approx(spread, rel=0.35), name
    assert any("embed" in n or "wte" in n for n in differ)
    layers = [t for n, t in stores[0].items() if n.endswith(("q_proj.weight", "c_attn.weight"))]
    assert not any(torch.equal(layers[0], other) for other in layers[1:] if other.shape == layers[0].shape)


def test_a_random_model_exports_and_loads(tmp_path: Path) -> None:
    model = meta_model(FAMILIES["qwen3_moe"](), dtype=torch.bfloat16)
    store = HostStore.allocate(anatomy_of(model, streamed=torch.bfloat16), pin=False, threads=1)
    init_random(store, meta_model=model, seed=0)
    export_model(store, tmp_path / "out", meta_model=model, source=None)
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert reloaded.dtype is torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]


def test_large_draws_are_the_same_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "PIECE_ELEMS", 1000)
    model = meta_model(FAMILIES["llama"](), dtype=torch.bfloat16)
    states = []
    for threads, moments in ((1, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
        store = HostStore.allocate(anatomy_of(model, streamed=torch.bfloat16), pin=False, threads=1, moments=moments)
        init_random(store, meta_model=model, seed=5, threads=threads)
        states.append(state_of(store))
        assert not any(bool(unit.moments.any()) for unit in store.units)  # weights were drawn in their room
    for other in states[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in states[0].items())
    embedding = states[0]["model.embed_tokens.weight"].view(-1)
    assert embedding.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(embedding[:1000], embedding[1000:2000])
