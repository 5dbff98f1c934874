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
    from spile.architectures.maple import MapleModel
    from spile.engines.base import Engine


def choose_engine(model: MapleModel | ForeignModel, options: EngineOptions) -> str:
    """Return the name of the engine that runs a model: what was asked for, else mlx where it has a GPU or the
    model is foreign, else cpu. Imports neither.

    Raises: UnsupportedModelError for a foreign model on the cpu engine.
    """
    from spile.architectures.foreign import ForeignModel

    if isinstance(model, ForeignModel):
        if options.engine == "cpu":
            raise UnsupportedModelError(
                f"the cpu engine does not run model_type {quote(model.checkpoint.config.get('model_type'))}",
                "Leave out --engine cpu: the mlx engine runs it.",
            )
        return "mlx"
    if options.engine != "auto":
        return options.engine
    return "mlx" if _mlx_has_gpu() else "cpu"


def open_engine(model: MapleModel | ForeignModel, options: EngineOptions) -> Engine:
    """Open the engine that `choose_engine` names. Touches disk: weights that stay resident are read.

    Raises:
        BudgetError: the budget is below what the model needs; the message says what that is.
        OptionError: an option that this machine cannot follow.
        ReadError, CheckpointError: weights that cannot be read.
        UnsupportedModelError: an architecture that the engine does not run; mlx is missing or of another version.
    """
    from spile.architectures.maple import MapleModel

    if choose_engine(model, options) == "mlx":
        from spile.engines.mlx.adapter import require

        require()
        from spile.engines.mlx.engine import MlxEngine

        return MlxEngine(
            model.checkpoint,
            options,
            vocab_size=model.config.vocab_size,
            longest=model.config.max_position_embeddings,
            num_chosen=model.config.num_experts_per_tok,
        )
    assert isinstance(model, MapleModel), "the cpu engine was chosen"
    options.check_experts(model.config.num_experts, model.config.num_experts_per_tok)
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
