"""Runs a mixture-of-experts language model in less memory than its weights need.

    import spile

    with spile.load("FOLDER", memory="630MB") as model:
        for chunk in model.stream("Why does sap run in spring?"):
            print(chunk.text, end="", flush=True)

Names are imported with their first use, so `import spile` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = (
    False  # as type checkers see it; importing `typing` takes time, and no guard of Ctrl-C is up yet
)
if TYPE_CHECKING:
    from typing import Any

    from spile.errors import BudgetError as BudgetError
    from spile.errors import CheckpointError as CheckpointError
    from spile.errors import ContextError as ContextError
    from spile.errors import ModelError as ModelError
    from spile.errors import ModelNotFoundError as ModelNotFoundError
    from spile.errors import OptionError as OptionError
    from spile.errors import PromptFileError as PromptFileError
    from spile.errors import ReadError as ReadError
    from spile.errors import SpileError as SpileError
    from spile.errors import TextError as TextError
    from spile.errors import UnsupportedModelError as UnsupportedModelError
    from spile.errors import WriteError as WriteError
    from spile.generation.generate import Chunk as Chunk
    from spile.generation.generate import Completion as Completion
    from spile.generation.generate import Stats as Stats
    from spile.generation.held import Held as Held
    from spile.generation.logprobs import Logprob as Logprob
    from spile.generation.options import Sampling as Sampling
    from spile.loading import load as load
    from spile.model import Model as Model

__version__ = "0.1.0"

_NAME_TO_MODULE = {
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "ContextError": "errors",
    "ModelError": "errors",
    "ModelNotFoundError": "errors",
    "OptionError": "errors",
    "PromptFileError": "errors",
    "ReadError": "errors",
    "SpileError": "errors",
    "TextError": "errors",
    "UnsupportedModelError": "errors",
    "WriteError": "errors",
    "Chunk": "generation.generate",
    "Completion": "generation.generate",
    "Stats": "generation.generate",
    "Held": "generation.held",
    "Logprob": "generation.logprobs",
    "Model": "model",
    "load": "loading",
    "Sampling": "generation.options",
}

__all__ = [
    "BudgetError",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ContextError",
    "Held",
    "Logprob",
    "Model",
    "ModelError",
    "ModelNotFoundError",
    "OptionError",
    "PromptFileError",
    "ReadError",
    "Sampling",
    "SpileError",
    "Stats",
    "TextError",
    "UnsupportedModelError",
    "WriteError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    module = _NAME_TO_MODULE.get(name)
    if module is None:
        raise AttributeError(f"module 'spile' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"spile.{module}"), name)


def __dir__() -> list[str]:
    return __all__
