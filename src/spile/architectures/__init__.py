"""The seam between checkpoints and architectures: which `model_type` is read by which module.

An architecture is a module of this package, named by its model_type, with an `open_...` function that
turns a `Checkpoint` into its model. To add one, write the module and add its line to the two tables here. What is
none of spile's own and what mlx-lm has is a `ForeignModel`, for the mlx engine alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spile.errors import UnsupportedModelError, quote

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.maple import MapleModel
    from spile.files.checkpoint import Checkpoint

MODEL_TYPES = ("maple",)
_CLASS_TO_MODEL_TYPE = {"MapleForCausalLM": "maple"}


def find_model_type(config: Mapping[str, Any]) -> str:
    """Return the model_type of a raw config; where it is absent, the one that `architectures` implies.

    Raises:
        UnsupportedModelError: spile does not run it; the message names it and what runs.
    """
    model_type, classes = config.get("model_type"), config.get("architectures")
    runs = ", ".join(MODEL_TYPES)
    if model_type is not None:
        if isinstance(model_type, str) and model_type in MODEL_TYPES:
            return model_type
        from spile.architectures.foreign import foreign_types

        foreign = foreign_types()
        if isinstance(model_type, str) and model_type in foreign:
            return model_type
        if not foreign:
            raise UnsupportedModelError(
                f"model_type {quote(model_type)} is not supported; spile by itself runs: {runs}",
                "For the architectures that mlx-lm has: pip install 'spile[mlx]'",
            )
        raise UnsupportedModelError(
            f"model_type {quote(model_type)} is not supported; spile runs: {runs}, and the {len(foreign)} that the "
            f"installed mlx-lm has"
        )
    for name in classes if isinstance(classes, list) else []:
        if isinstance(name, str) and name in _CLASS_TO_MODEL_TYPE:
            return _CLASS_TO_MODEL_TYPE[name]
    if classes:
        raise UnsupportedModelError(f"architecture {quote(classes)} is not supported; spile runs: {runs}")
    raise UnsupportedModelError(f"config.json names neither model_type nor architectures; spile runs: {runs}")


def open_model(checkpoint: Checkpoint) -> MapleModel | ForeignModel:
    """Open a checkpoint with the module of its architecture.

    Raises:
        UnsupportedModelError: spile does not run this architecture or one of its values.
        CheckpointError: tensors are missing or contradict the config.
    """
    if find_model_type(checkpoint.config) in MODEL_TYPES:
        from spile.architectures.maple import open_maple

        return open_maple(checkpoint)
    from spile.architectures.foreign import open_foreign

    return open_foreign(checkpoint)
