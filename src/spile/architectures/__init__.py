"""The seam between checkpoints and architectures: which `model_type` is read by which module.

An architecture is a module of this package, named by its model_type, whose `read` turns a config and the tensors that
are there into a `ModelSpec`. To add one, write the module and add its line to the table here. What is none of spile's
own and what mlx-lm has is a `ForeignModel`, for the mlx engine alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from spile.errors import CheckpointError, UnsupportedModelError, quote

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.spec import OwnModel
    from spile.files.checkpoint import Checkpoint

MODEL_TYPES = {  # and the class by which a config without model_type names it
    "maple": "MapleForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


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
        for own, its_class in MODEL_TYPES.items():
            if name == its_class:
                return own
    if classes:
        raise UnsupportedModelError(f"architecture {quote(classes)} is not supported; spile runs: {runs}")
    raise UnsupportedModelError(f"config.json names neither model_type nor architectures; spile runs: {runs}")


def open_model(checkpoint: Checkpoint) -> OwnModel | ForeignModel:
    """Open a checkpoint with the module of its architecture; every tensor's dtype and shape is checked. No disk access.

    Raises:
        UnsupportedModelError: spile does not run this architecture or one of its values.
        CheckpointError: a value makes no sense, tensors are missing or contradict the config.
    """
    from spile.architectures.foreign import foreign_types, open_foreign

    model_type = find_model_type(checkpoint.config)
    if model_type in MODEL_TYPES:
        try:
            return open_own(checkpoint)
        except UnsupportedModelError:
            if model_type not in foreign_types():
                raise
    return open_foreign(checkpoint)


def open_own(checkpoint: Checkpoint) -> OwnModel:
    """Open a checkpoint of one of `MODEL_TYPES`. Raises: as `open_model`."""
    from spile.architectures.reading import check_tensor
    from spile.architectures.spec import OwnModel

    model_type, tensors = find_model_type(checkpoint.config), checkpoint.tensors
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type {quote(model_type)} is not supported here; spile by itself runs: {', '.join(MODEL_TYPES)}"
        )
    module = import_module(f"spile.architectures.{model_type}")
    spec, known = module.read(checkpoint.config, tensors), set()
    for each in spec.tensors():
        known.add(check_tensor(tensors, each).name)
    ignored = re.compile(module.IGNORED)
    for name in tensors:
        if name not in known and not ignored.fullmatch(name):
            raise CheckpointError(
                f"tensor {quote(name)} has no place in a {model_type} of {spec.num_hidden_layers} layers and "
                f"{spec.num_experts} experts",
                "The config and the weights are not of the same model.",
            )
    return OwnModel(checkpoint, spec)
