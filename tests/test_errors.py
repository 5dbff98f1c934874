"""The error tree: what a user can catch, and that foreign text cannot break a message."""

import pytest

from spile import errors
from spile.errors import ReadError, SpileError, quote


def test_every_error_is_a_spile_error_and_keeps_its_hint() -> None:
    classes = [
        item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)
    ]
    assert len(classes) == 12
    for kind in classes:
        error = kind("what is wrong", "what to do")
        assert isinstance(error, SpileError)
        assert str(error) == "what is wrong"
        assert error.hint == "what to do"
        assert kind("no hint").hint is None


def test_what_makes_a_model_unusable_is_a_model_error() -> None:
    for kind in (errors.ModelNotFoundError, errors.CheckpointError, errors.UnsupportedModelError):
        assert issubclass(kind, errors.ModelError)
    for kind in (errors.BudgetError, errors.ReadError, errors.OptionError, errors.WriteError):
        assert not issubclass(kind, errors.ModelError)


def test_a_read_error_holds_file_offset_wanted_and_got() -> None:
    message = str(ReadError.at("a.safetensors", 4096, 8192, 100, "the file ends there"))
    assert message == (
        "cannot read a.safetensors: at offset 4,096 wanted 8,192 bytes, got 100: the file ends there"
    )


@pytest.mark.parametrize(
    "value", ["a\nb", "\x1b[31m", "\ud800", "é" * 500, ["x"] * 1000, {"a": 1}, None, 10**400]
)
def test_a_quoted_value_is_one_short_line_of_printable_ascii(value: object) -> None:
    shown = quote(value)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 120
