from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.units import Duration, exact_size, format_seconds, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("24 gib", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        (".5 TiB", 2**39),
        ("512MiB", 2**29),
        ("10_000 KB", 10**7),
        ("1024", 1024),
        ("7 bytes", 7),
        (4096, 4096),
        (0, 0),
        ("9007199254740993", 9007199254740993),  # beyond what a float holds
    ],
)
def test_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 GiBs", "-3 GB", "24,5 GB", "1e9", "24 GB 3", "24X", -1, True])
def test_not_a_size(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["24G", "24 g", "24Gi", "3M"])
def test_a_size_that_could_be_two_things_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write .iB \(powers of 1024\) or .B \(powers of 1000\)"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_exact_size_reads_back(size: int) -> None:
    assert parse_size(exact_size(size)) == size


@given(st.integers(min_value=1, max_value=900), st.sampled_from(["KiB", "MiB", "GiB", "KB", "MB", "GB", "TB"]))
def test_exact_size_is_short(number: int, unit: str) -> None:
    size = parse_size(f"{number}{unit}")
    assert len(str(exact_size(size))) <= len(f"{number}{unit}")


def test_size_for_people() -> None:
    assert format_size(999) == "999 bytes"
    assert format_size(24 * 2**30) == "24.0 GiB"
    assert format_size(-3 * 2**20) == "-3.0 MiB"


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (500, 500, "steps"),
        ("500", 500, "steps"),
        ("20 steps", 20, "steps"),
        ("1 step", 1, "steps"),
        ("1 epoch", 1, "epochs"),
        ("2epochs", 2, "epochs"),
        ("30 min", 1800, "seconds"),
        ("1.5 h", 5400, "seconds"),
        ("45s", 45, "seconds"),
        ("2 Hours", 7200, "seconds"),
    ],
)
def test_duration(text: str | int, value: int, unit: str) -> None:
    assert Duration.parse(text) == Duration(value, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["0", 0, "-5", "soon", "1.5 steps", "0.5 epochs", "3 fortnights", "", True, "1 epoch 3"]
)
def test_not_a_duration(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"interval|whole|unknown unit"):
        Duration.parse(text)


@given(st.integers(min_value=1, max_value=10**6), st.sampled_from(["steps", "epochs", "s", "min", "h"]))
def test_a_duration_reads_back(number: int, unit: str) -> None:
    duration = Duration.parse(f"{number} {unit}")
    assert Duration.parse(str(duration)) == duration


def test_seconds_for_people() -> None:
    assert [format_seconds(s) for s in (4.24, 59.97, 185, 7800)] == ["4.2 s", "1 min 00 s", "3 min 05 s", "2 h 10 min"]
