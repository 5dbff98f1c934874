"""Sizes as people write them."""

import pytest

from spile.errors import OptionError
from spile.sizes import format_size, parse_budget, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("630MB", 630_000_000),
        ("630 MB", 630_000_000),
        (" 630mb ", 630_000_000),
        ("630M", 630_000_000),
        ("1GB", 10**9),
        ("1.5GB", 1_500_000_000),
        ("0.1GB", 100_000_000),  # exactly, as 0.1 is not
        ("1GiB", 2**30),
        ("1.5MiB", 1_572_864),
        ("4KiB", 4096),
        ("786kB", 786_000),
        ("1TB", 10**12),
        ("512", 512),
        ("512B", 512),
    ],
)
def test_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "1e9", "630XB", "6 3MB", "1,5GB", "auto", "\u0661MB", "0", "0.1", "99999999TB"]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(OptionError, match="--memory"):
        parse_size(text, name="--memory")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (786_432, "786 kB"),
        (1_600_000, "1.6 MB"),
        (99_940_000, "99.9 MB"),
        (99_960_000, "100 MB"),
        (630_000_000, "630 MB"),
        (999_700_000, "1.00 GB"),
        (5_308_186_624, "5.31 GB"),
        (53_081_866_240, "53.1 GB"),
        (2 * 10**12, "2.00 TB"),
        (5 * 10**15, "5,000 TB"),
    ],
)
def test_size_is_written(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize("nbytes", [1, 999, 40_960, 630_000_000, 2**40])
def test_what_is_written_can_be_read_again(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.02)


@pytest.mark.parametrize(
    ("memory", "meant"),
    [
        ("630", "630MB"),
        ("2", "2GB"),
        ("1.5", "1.5GB"),
        ("300B", "300MB"),
        ("630 kB", "630MB"),
        (512, "512MB"),
    ],
)
def test_budget_without_its_unit_is_refused_with_the_likely_one(memory: str | int, meant: str) -> None:
    with pytest.raises(OptionError, match="less than any process takes") as error:
        parse_budget(memory, name="--memory")
    assert error.value.hint == f"Did you mean {meant}?"


def test_budget_in_bytes_is_read() -> None:
    assert parse_budget("630000000") == parse_budget(630_000_000) == parse_budget("630MB") == 630_000_000
