from __future__ import annotations

import mmap

import pytest
import torch
from transformers import LlamaConfig

from host.host_tiny import anatomy_of, meta_model, run_alone
from megatrain.host.arena import Arena
from megatrain.host.arena import footprint as arena_footprint
from megatrain.host.store import HostStore, footprint

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def bf16_store(*, extra: int = 0, training: bool = True, moments: torch.dtype = torch.float32) -> HostStore:
    anatomy = anatomy_of(meta_model(CONFIG, dtype=torch.bfloat16), streamed=torch.bfloat16)
    return HostStore.allocate(
        anatomy, pin=False, threads=2, extra_pinned_bytes=extra, training=training, moments=moments
    )


def test_blocks_are_aligned_zero_and_apart() -> None:
    arena = Arena(pinned_bytes=8192, pageable_bytes=1000, threads=2, pin=False)
    blocks = [arena.take(n, pinned=p) for n, p in ((5000, True), (300, False), (1, False), (0, False))]
    assert [b.numel() for b in blocks] == [5000, 300, 1, 0]
    assert all(b.data_ptr() % 256 == 0 for b in blocks if b.numel())
    assert blocks[0].data_ptr() % mmap.PAGESIZE == 0
    assert not any(b.any() for b in blocks)
    for value, block in enumerate(blocks, 1):
        block.fill_(value)
    assert all((b == v).all() for v, b in enumerate(blocks, 1))
    with pytest.raises(RuntimeError, match="no room"):
        arena.take(1 << 20, pinned=False)


def test_memory_stays_while_a_tensor_views_it() -> None:
    block = Arena(pinned_bytes=0, pageable_bytes=1 << 22, threads=1, pin=False).take(1 << 22, pinned=False)
    assert int(block.fill_(3).sum()) == 3 << 22


def test_nothing_wanted_is_all_there_is() -> None:
    arena = Arena(pinned_bytes=4096, pageable_bytes=0, threads=1, pin=False)
    arena.take(4096, pinned=True)
    assert arena.pinned_fraction == 1.0
    assert arena.report.failure is None


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_store_has_the_sizes_of_the_layout(moments: torch.dtype) -> None:
    store = bf16_store(moments=moments)
    assert [u.unit.index for u in store.units] == [0, 1, 2, 3, 4]
    assert store.stem is store.units[0]
    assert store.tail is store.units[-1]
    assert len(store.layers) == 3
    for unit in store.units:
        layout = unit.unit.layout
        assert unit.hi.numel() == layout.nbytes
        assert unit.lo.numel() == layout.bf16_elems
        for moment in (unit.exp_avg, unit.exp_avg_sq):
            assert (moment.dtype, moment.numel()) == (moments, layout.elems)
            assert moment.data_ptr() % 256 == 0
        assert unit.moments.numel() == 2 * moments.itemsize * layout.elems
        unit.exp_avg.fill_(1)
        assert not unit.exp_avg_sq.any()
        assert unit.grad.numel() == layout.param_bytes
        assert unit.steps.tolist() == [0] * len(layout.params)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("training", [True, False])
def test_footprint_is_what_allocate_takes(training: bool, moments: torch.dtype) -> None:
    store = bf16_store(extra=5000, training=training, moments=moments)
    anatomy = anatomy_of(meta_model(CONFIG, dtype=torch.bfloat16), streamed=torch.bfloat16)
    sizes = footprint(anatomy, extra_pinned_bytes=5000, training=training, moments=moments)
    assert store.arena.take(5000, pinned=True).numel() == 5000
    assert sum(sizes.values()) == store.report.total_bytes - mmap.PAGESIZE
    assert sizes["extra"] == arena_footprint(5000, pinned=True)
    elems = sum(unit.unit.layout.elems for unit in store.units)
    assert sizes["optimizer"] == (2 * moments.itemsize * elems if training else 0)
    with pytest.raises(RuntimeError, match="no room"):
        store.arena.take(mmap.PAGESIZE + 1, pinned=True)


def test_master_comes_back_exactly() -> None:
    store = bf16_store()
    for unit in store.units:
        for entry in unit.unit.layout.params:
            value = torch.randn(entry.shape)
            unit.set_master(entry, value)
            assert torch.equal(unit.master(entry), value)
            assert (unit.streamed(entry).float() - value).abs().max() <= value.abs().max() * 2**-8


def test_set_master_refuses_another_shape() -> None:
    store = bf16_store()
    entry = store.stem.unit.layout.params[0]
    with pytest.raises(ValueError, match="fp32"):
        store.stem.set_master(entry, torch.zeros(3))


def test_pages_are_touched_once_and_cost_their_size() -> None:
    """In a process of its own: resident memory grows by the arena's size when it is made, and not when it is used."""
    script = """
        import resource, re
        from pathlib import Path
        from megatrain.host.arena import Arena
        def rss():
            return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) << 10
        size = (129 << 20) + (512 << 10)
        before = rss()
        arena = Arena(pinned_bytes=size, pageable_bytes=0, threads=2, pin=False)
        made = rss() - before
        block = arena.take(size, pinned=True)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block.fill_(1)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        print(made / size, (rss() - before) / size, faults)
    """
    out = run_alone(script)
    assert 0.99 < float(out[0]) < 1.06
    assert 0.99 < float(out[1]) < 1.06
    assert int(out[2]) < 200
