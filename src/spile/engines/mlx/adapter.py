"""Turns mlx-lm into the few names that the engine uses: the only file that imports mlx_lm.

It loads a checkpoint's model lazily and without running anything that lies in its folder, and keeps what
importing mlx-lm does to the process (a lower limit of open files) from lasting. It does not know slots.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spile.architectures import MODEL_TYPES, find_model_type
from spile.errors import CheckpointError, UnsupportedModelError, quote

if TYPE_CHECKING:
    from spile.files.checkpoint import Checkpoint

# The versions that the engine was tested with; pyproject.toml says the same to pip.
VERSIONS = {"mlx": ((0, 32, 4), (0, 33)), "mlx-lm": ((0, 32, 2), (0, 33))}
# Every name of mlx-lm that the engine uses, by module.
NAMES = {
    "mlx_lm.utils": ("load_model", "load_config", "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"),
    "mlx_lm.models.cache": (
        "make_prompt_cache", "can_trim_prompt_cache", "trim_prompt_cache", "KVCache",
        "RotatingKVCache", "CacheList", "ArraysCache",
    ),
    "mlx_lm.models.base": ("create_attention_mask", "scaled_dot_product_attention"),
    "mlx_lm.models.switch_layers": ("SwitchGLU", "SwitchMLP", "SwitchLinear", "QuantizedSwitchLinear", "SwiGLU"),
}  # fmt: skip
_INSTALL = "Install what spile was tested with: pip install 'spile[mlx]'"
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_]+")
OWN_MODULES = {  # model types that mlx-lm does not have
    name: f"spile.engines.mlx.{name}"
    for name in MODEL_TYPES
    if Path(__file__).with_name(f"{name}.py").exists()
}


def require() -> None:
    """Import mlx and mlx-lm, checking what is there. Cost: a second and 70 MB the first time.

    Raises: UnsupportedModelError when one is missing, of another version, without its native library, or lacks
    a name that the engine uses.
    """
    for package, (oldest, newest) in VERSIONS.items():
        version = _version(package)
        if version is None:
            raise UnsupportedModelError(f"the mlx engine needs {package}, which is not installed", _INSTALL)
        if not oldest <= version < newest:
            raise UnsupportedModelError(
                f"{package} is {_dotted(version)} and spile was tested with {_dotted(oldest)} up to below "
                f"{_dotted(newest)}",
                _INSTALL,
            )
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(f"mlx is installed without what it runs on: {error}", _INSTALL) from error
    for module, names in NAMES.items():
        try:
            found = _import(module)
        except ImportError as error:
            raise UnsupportedModelError(f"mlx-lm cannot be imported: {error}", _INSTALL) from error
        for name in names:
            if not hasattr(found, name):
                raise UnsupportedModelError(f"mlx-lm has no {module}.{name} any more", _INSTALL)


def model_module(config: Mapping[str, Any]) -> ModuleType:
    """Import the module that a config's model_type (or architecture) names: mlx-lm's or our own.

    Raises: UnsupportedModelError naming the type.
    """
    utils = _import("mlx_lm.utils")
    model_type = config.get("model_type")
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else [classes]:
        remapped = (
            utils.MODEL_ARCHITECTURE_REMAPPING.get((model_type, name)) if isinstance(name, str) else None
        )
        if remapped is not None:
            model_type = remapped
            break
    else:
        if isinstance(model_type, str):
            model_type = utils.MODEL_REMAPPING.get(model_type, model_type)
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise UnsupportedModelError(f"config.json names model_type {quote(model_type)}, which nobody has")
    name = OWN_MODULES.get(model_type, f"mlx_lm.models.{model_type}")
    try:
        module: ModuleType = _import(name)
    except ImportError as error:
        if error.name not in (name, model_type):
            raise UnsupportedModelError(f"model_type {model_type} cannot be imported: {error}") from error
        raise UnsupportedModelError(
            f"model_type {quote(model_type)} is not supported: neither spile nor mlx-lm "
            f"{importlib.metadata.version('mlx-lm')} has it"
        ) from error
    if not hasattr(module, "Model") or not hasattr(module, "ModelArgs"):
        raise UnsupportedModelError(f"model_type {quote(model_type)} is no model of mlx-lm's")
    return module


def load_lazily(checkpoint: Checkpoint, load: Callable[[str], Any] | None = None) -> Any:
    """Build the model of a checkpoint as `mlx_lm.load` would, with no weight read. Returns an nn.Module.

    mlx-lm is given a folder of links to exactly the checked shards and a config without `model_file`: which
    files count is decided in one place, and nothing of the folder is run. `load` replaces what turns a shard's
    path into arrays.

    Raises: UnsupportedModelError, CheckpointError.
    """
    import mlx.core as mx

    require()
    utils = _import("mlx_lm.utils")
    config = {key: value for key, value in checkpoint.config.items() if key not in ("model_file", "auto_map")}
    config.setdefault("model_type", find_model_type(config))
    model_module(config)
    with TemporaryDirectory(prefix="spile-mlx-") as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(config))
        for index, shard in enumerate(checkpoint.shards):
            os.symlink(shard.resolve(), folder / f"model-{index:05d}.safetensors")
        extra = checkpoint.folder / "hf_quant_config.json"
        if extra.is_file():
            os.symlink(extra.resolve(), folder / extra.name)
        own = mx.load
        if load is not None:
            mx.load = load
        try:
            model, _ = utils.load_model(
                folder,
                lazy=True,
                get_model_classes=lambda config: _classes(model_module(config)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"mlx-lm cannot load {checkpoint.folder} as {quote(config.get('model_type'))}: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error
        finally:
            mx.load = own
    return model


def add_own_models() -> None:
    """Let mlx-lm itself load the model types that it does not have: their modules among its own, and a config's
    `model_file` left unread, which mlx-lm would run or stop at. For this process; a second call does nothing.
    """
    require()
    for model_type, module in OWN_MODULES.items():
        sys.modules[f"mlx_lm.models.{model_type}"] = _import(module)
    utils = _import("mlx_lm.utils")
    own = utils.load_config
    if getattr(own, "is_spiles", False):
        return

    def load_config(folder: Path) -> dict[str, Any]:
        config: dict[str, Any] = own(folder)
        if model_type_of(config) in OWN_MODULES:
            config["model_type"] = model_type_of(config)
            config.pop("model_file", None)
        return config

    load_config.is_spiles = True  # type: ignore[attr-defined]
    utils.load_config = load_config


def model_type_of(config: Mapping[str, Any]) -> str | None:
    """Return the model_type of a config, or what its architecture implies; None where it has neither."""
    try:
        return find_model_type(config)
    except UnsupportedModelError:
        return None


def make_cache(model: Any) -> list[Any]:
    """Make the empty prompt cache that mlx-lm makes for a model."""
    caches: list[Any] = cache_module().make_prompt_cache(model)
    return caches


def can_trim(caches: list[Any]) -> bool:
    """Whether tokens can be taken off the end of a prompt cache."""
    return bool(_import("mlx_lm.models.cache").can_trim_prompt_cache(caches))


def trim(caches: list[Any], num_tokens: int) -> None:
    """Take tokens off the end of a prompt cache."""
    _import("mlx_lm.models.cache").trim_prompt_cache(caches, num_tokens)


def fixed_caches() -> tuple[type, ...]:
    """The kinds of cache whose growth is known: none, or that of their keys and values."""
    module = cache_module()
    return module.ArraysCache, module.KVCache, module.RotatingKVCache


def versions() -> str:
    """Say which mlx and mlx-lm are installed."""
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in VERSIONS)


def cache_module() -> Any:
    """mlx-lm's caches."""
    return _import("mlx_lm.models.cache")


def switch_layers() -> Any:
    """mlx-lm's layers of experts."""
    return _import("mlx_lm.models.switch_layers")


def attention_module() -> Any:
    """mlx-lm's masks and attention."""
    return _import("mlx_lm.models.base")


def _classes(module: ModuleType) -> tuple[Any, Any]:
    return module.Model, module.ModelArgs


def _import(name: str) -> Any:
    with _same_file_limit():
        return importlib.import_module(name)


@contextlib.contextmanager
def _same_file_limit() -> Iterator[None]:
    """Put back the limits of open files, which mlx_lm.utils lowers when it is imported (0.32.2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = resource.setrlimit

    def keep(which: int, limits: tuple[int, int]) -> None:
        # A hard limit cannot be raised again by a user who is not root.
        if which != resource.RLIMIT_NOFILE:
            own(which, limits)

    resource.setrlimit = keep
    try:
        yield
    finally:
        resource.setrlimit = own
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard), "the limit of open files changed"


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
