"""Chooses and opens an engine for a model.

It does not know how an engine works.
"""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

from spile.errors import UnsupportedModelError, quote
from spile.options import EngineOptions

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.spec import OwnModel
    from spile.engines.base import Engine


def choose_engine(model: OwnModel | ForeignModel, options: EngineOptions) -> str:
    """Return the name of the engine that runs a model: what was asked for, else mlx where it has a GPU or the
    cpu engine cannot compute the model, else cpu. Imports neither.

    Raises: UnsupportedModelError where the cpu engine cannot, and was asked for or is all there is.
    """
    from spile.architectures.foreign import foreign_types

    why = why_not_cpu(model)
    if why is not None:
        if options.engine == "cpu":
            raise UnsupportedModelError(why, "Leave out --engine cpu: the mlx engine runs it.")
        if options.engine == "auto" and not foreign_types():
            raise UnsupportedModelError(why, "The mlx engine runs it: pip install 'spile[mlx]'")
        return "mlx"
    if options.engine != "auto":
        return options.engine
    return "mlx" if _mlx_has_gpu() else "cpu"


def why_not_cpu(model: OwnModel | ForeignModel) -> str | None:
    """Say in a sentence what the cpu engine lacks for a model; None where it runs it. Imports no engine."""
    from spile.architectures.spec import OwnModel
    from spile.engines.cpu.blocks import missing_blocks

    model_type = quote(model.checkpoint.config.get("model_type"))
    if not isinstance(model, OwnModel):
        return f"the cpu engine does not run model_type {model_type}"
    missing = ", ".join(missing_blocks(model.spec))
    return (
        f"the cpu engine does not compute model_type {model_type} yet: it has {missing}" if missing else None
    )


def open_engine(model: OwnModel | ForeignModel, options: EngineOptions) -> Engine:
    """Open the engine that `choose_engine` names. Touches disk: weights that stay resident are read.

    Raises:
        BudgetError: the budget is below what the model needs; the message says what that is.
        OptionError: an option that this machine cannot follow.
        ReadError, CheckpointError: weights that cannot be read.
        UnsupportedModelError: an architecture that the engine does not run; mlx is missing or of another version.
    """
    from spile.architectures.spec import OwnModel

    if choose_engine(model, options) == "mlx":
        from spile.engines.mlx.adapter import require

        require()
        from spile.engines.mlx.engine import MlxEngine

        return MlxEngine(
            model.checkpoint,
            options,
            vocab_size=model.spec.vocab_size,
            longest=model.spec.max_position_embeddings,
            num_chosen=model.spec.num_experts_per_tok,
        )
    assert isinstance(model, OwnModel), "the cpu engine was chosen"
    options.check_experts(model.spec.num_experts, model.spec.num_experts_per_tok)
    from spile.engines.cpu.engine import CpuEngine

    return CpuEngine(model, options)


def _mlx_has_gpu() -> bool:
    """Whether mlx and mlx-lm are installed in a form that runs on this machine's GPU. Imports neither."""
    from importlib.metadata import PackageNotFoundError, version

    def has(package: str) -> bool:
        try:
            version(package)
        except PackageNotFoundError:
            return False
        return True

    has_gpu = has("mlx-cuda-12") or has("mlx-cuda-13")
    if sys.platform == "darwin":
        has_gpu = platform.machine() == "arm64"
    return has_gpu and has("mlx") and has("mlx-lm")
