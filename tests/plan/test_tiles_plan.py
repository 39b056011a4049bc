"""When the planner runs MLPs in tiles, and what that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import GIB, SEVEN_B, job, limits

from megatrain.model.sizes_types import TileSizes
from megatrain.plan.cutting import TILE_TOKENS, attempt, nearest
from megatrain.plan.explain import explain
from megatrain.plan.job import Job
from megatrain.plan.largest import find_largest, scaled
from megatrain.plan.transient import RECOMPUTE_FACTOR

REST, MLP = 80_904, 151_552
TILED = replace(
    SEVEN_B,
    tiling=TileSizes(REST, MLP, 3 * 3584 * 18_944),
    widest_bytes_per_token=37_888,
    attention_bytes_per_token=7280,
    attention_layers=28,
)
ROOMY = limits(512 * GIB, vram=141 * GIB)


def long(tokens: int, **changes: object) -> Job:
    return job(TILED, batch=1, seq=tokens, **{"limits": ROOMY, "compiled": True, **changes})


@pytest.mark.parametrize(("tokens", "tiles"), [(131_072, False), (262_144, False), (524_288, True)])
def test_rows_run_in_tiles_only_where_they_do_not_fit_otherwise(tokens: int, tiles: bool) -> None:
    chosen = attempt(long(tokens))
    assert chosen.fits
    assert bool(chosen.tile_tokens) is tiles
    assert chosen.kept == 0


def test_what_a_tiled_backward_takes() -> None:
    tokens = 524_288
    chosen = attempt(long(tokens, can_reside=False))
    whole = attempt(replace(long(tokens), sizes=replace(TILED, tiling=None)))
    assert not whole.fits
    layer = TILED.layers[0].param_bytes
    in_tile = REST * tokens + 2 * chosen.input_bytes + int(RECOMPUTE_FACTOR * MLP * TILE_TOKENS)
    expected = layer + max(in_tile + 4 * 3 * 3584 * 18_944, int(RECOMPUTE_FACTOR * REST * tokens))
    assert chosen.device["one layer's backward or the head"] == expected
    assert any("tiles of 8,192 tokens" in line for line in explain(chosen, job=long(tokens)))


def test_a_run_that_goes_on_stays_as_it_was() -> None:
    tiled, whole = attempt(long(524_288)), attempt(long(262_144))
    assert attempt(long(524_288, resumed=tiled)).tile_tokens == TILE_TOKENS
    assert attempt(long(262_144, resumed=whole)).tile_tokens == 0
    assert attempt(long(262_144, resumed=replace(whole, tile_tokens=4096))).tile_tokens == 4096


def test_the_nearest_plan_has_tiles() -> None:
    assert nearest(long(1 << 21)).tile_tokens == TILE_TOKENS
    assert nearest(long(4096)).tile_tokens == 0


def test_the_longest_row_is_longer_with_tiles() -> None:
    with_tiles = find_largest(long(8192)).max_seq_len
    without = find_largest(replace(long(8192), sizes=replace(TILED, tiling=None))).max_seq_len
    assert with_tiles > 1.5 * without


def test_a_larger_shape_has_larger_tiles() -> None:
    twice = scaled(TILED, 2.0).tiling
    assert twice == TileSizes(2 * REST, 2 * MLP, 4 * 3 * 3584 * 18_944)
