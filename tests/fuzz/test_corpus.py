"""Every kept input, and a few new ones for each target. Long fuzzing: ``python -m tests.fuzz.run --minutes 10``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.guard import outcome
from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())
SLOW = {"config": 6, "tokenizer": 8}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_kept_input_is_read_or_refused(path: Path, tmp_path: Path) -> None:
    """The file's name says which of the two."""
    expected = "valid" if path.name.startswith("good") else "refused"
    assert outcome(TARGETS[path.parent.name], path.read_bytes(), folder=tmp_path) == expected


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs_are_read_or_refused(name: str, tmp_path: Path) -> None:
    count = 0

    @settings(
        max_examples=SLOW.get(name, 20),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=TARGETS[name].inputs)
    def once(data: bytes) -> None:
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        folder.mkdir()
        assert outcome(TARGETS[name], data, folder=folder) in {"valid", "refused"}

    once()
    assert count > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=2000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_many_new_inputs(name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("input")
    assert outcome(TARGETS[name], data.draw(TARGETS[name].inputs), folder=folder) in {"valid", "refused"}


def test_every_target_has_kept_inputs() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)
    assert all(path.stat().st_size <= 20_000 for path in KEPT)
