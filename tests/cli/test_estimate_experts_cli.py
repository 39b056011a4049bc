"""``megatrain estimate-memory`` of a mixture of experts whose layer is larger than the device has room for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from estimating import SHAPES, run

GIB = 1 << 30


def report(capsys: pytest.CaptureFixture[str], *, vram: str) -> dict[str, Any]:
    run(SHAPES / "mixtral-8x7b", vram=vram, host="768GiB")
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_it_fits_in_groups_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Read from its structure, then from what was kept of it: the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    first, again = report(capsys, vram="10GiB"), report(capsys, vram="10GiB")
    assert first["fits"]
    assert first["plan"]["expert_groups"] >= 2
    assert first["device"]["groups of experts"] > GIB
    assert first["device"]["total_bytes"] <= 10 * GIB
    assert [said for said in first["explanation"] if "the 8 experts of a layer come in" in said]
    assert (again["plan"], again["device"], again["speed"]) == (first["plan"], first["device"], first["speed"])
    roomy = report(capsys, vram="80GiB")
    assert roomy["plan"]["expert_groups"] == 0
    assert roomy["speed"]["step_s"] < first["speed"]["step_s"]
