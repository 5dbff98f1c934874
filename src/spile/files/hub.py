"""Turns what a user calls a model (nothing, a folder, a hub id) into a folder on disk.

Only a hub id reaches the network, through huggingface_hub, imported when it is needed. Of a repository only
the files that a model needs are downloaded, never code, and free disk is checked first. It does not read
weights.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spile.architectures import find_model_type
from spile.errors import CheckpointError, ModelError, ModelNotFoundError, SpileError, WriteError, quote
from spile.files.checkpoint import INDEX_NAME, check_folder, read_config, read_weight_map
from spile.files.safetensors import LARGEST_HEADER_NBYTES
from spile.files.writer import FULL_DISK

DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_ADDRESS = re.compile(rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/({_HUB_ID.pattern})(?:[/?#].*)?$")
_LARGEST_TEXT_FILE_NBYTES = 100_000_000
_USUAL_HEADER_NBYTES = 100_000  # most headers are shorter: one request
_LARGE_FILE_NBYTES = 500_000_000
_TIMEOUT_SECONDS = 30
_RESERVE_NBYTES = 100_000_000  # free disk to leave
_HOW_TO_NAME = "Name a folder with config.json and safetensors, or a hub id such as deepgrove/maple-2bit-mlx."


def resolve(source: str | Path | None, *, offline: bool = False) -> Path:
    """Return the folder of a model; None is the built-in demo model. Downloads a hub id that is not cached.

    Raises:
        ModelNotFoundError: no such folder, file or hub id, or no connection.
        ModelError: the repository holds something that spile does not run.
        WriteError: the disk has too little room for a download.
    """
    if source is None:
        if not (DEMO_FOLDER / "config.json").is_file():
            raise ModelNotFoundError(
                f"the demo model is not installed: looked in {DEMO_FOLDER}", _HOW_TO_NAME
            )
        return DEMO_FOLDER
    text = os.fspath(source) if isinstance(source, Path) else _without_address(source)
    if not text.strip():
        raise ModelNotFoundError("the name of the model is empty", _HOW_TO_NAME)
    if text.lower().endswith(".gguf"):
        raise ModelNotFoundError(
            f"{quote(text)} names a GGUF file, and spile reads safetensors: a folder with config.json",
            "Name a folder or a hub id that holds the model as safetensors.",
        )
    try:
        folder = Path(text).expanduser()
        if folder.is_dir():
            check_folder(folder)
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelNotFoundError(f"cannot read {quote(text)}: {reason}") from error
    if exists:
        raise ModelNotFoundError(f"{text} is a file, not a folder", f"Name its folder: {folder.parent}")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(text):
        looked_for = f"looked for the folder {os.path.abspath(folder)}"
        raise ModelNotFoundError(f"there is no model {quote(text)}: {looked_for}", _HOW_TO_NAME)
    return _find_in_hub(text, Hub(), offline or _is_offline())


def resolve_headers(source: str | Path | None, room: Path, *, offline: bool = False) -> tuple[Path, bool]:
    """Return a folder to read a model's headers from, and whether its weights are there too.

    A hub id whose weights are not in the cache is not downloaded: `room`, an empty folder, gets its small files
    and, for each shard, a file as long as the shard that holds its header and nothing else. Asks the network for
    those headers, and for small files that are not in the cache.

    Raises: as `resolve`.
    """
    hub_id = None if source is None or isinstance(source, Path) else _without_address(source)
    if hub_id is None or not _HUB_ID.fullmatch(hub_id) or Path(hub_id).expanduser().exists():
        return resolve(source, offline=offline), True
    hub = Hub()
    if offline or _is_offline():
        return _find_in_hub(hub_id, hub, True), True
    try:
        with _hub_errors(hub_id):
            sizes = hub.sizes(hub_id)
    except _Unreachable as error:
        return _cached_instead(hub_id, hub, error), True
    folder = _download_texts(hub_id, hub, sizes)
    weights = _weights(hub_id, folder, sizes)
    if all(_is_cached(hub_id, hub, name, sizes[name]) for name in weights):
        return folder, True
    for path in folder.iterdir():
        if path.is_file() and path.name in sizes and _is_text(path.name):
            shutil.copyfile(path, room / path.name)
    for name in weights:
        _write_header(hub_id, hub, name, sizes[name], room / name)
    return room, False


def _without_address(name: str) -> str:
    """Return the hub id in the address of a model's page, as a browser shows it; any other name as it is."""
    match = _ADDRESS.match(name.strip())
    return name if match is None else match[1]


def large_cached_file() -> Path | None:
    """Return the largest file of the hub's cache, to measure its disk with; None where there is no large one."""
    blobs = [path for path in Hub().cache_folder().glob("models--*/blobs/*") if path.is_file()]
    largest = max(blobs, key=lambda path: path.stat().st_size, default=None)
    return largest if largest is not None and largest.stat().st_size >= _LARGE_FILE_NBYTES else None


class Hub:
    """The few things that are asked of huggingface_hub; tests put another in its place."""

    def sizes(self, hub_id: str) -> dict[str, int]:
        """Return the files of a repository and their bytes. Asks the network."""
        from huggingface_hub import HfApi

        info = HfApi().model_info(hub_id, files_metadata=True)
        return {item.rfilename: item.size or 0 for item in info.siblings or []}

    def cached(self, hub_id: str, name: str) -> Path | None:
        """Return a file's place in the cache, if it is there."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(hub_id, name)
        return Path(path) if isinstance(path, str) else None

    def download(self, hub_id: str, names: Iterable[str]) -> Path:
        """Download files, with progress on stderr, and return their folder."""
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, allow_patterns=[glob.escape(name) for name in names]))

    def read_range(self, hub_id: str, name: str, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of a file, or fewer. Asks the network."""
        import huggingface_hub
        from huggingface_hub import utils

        session: Any = huggingface_hub.get_session()  # of httpx, and of requests before version 1
        headers = {**utils.build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}  # type: ignore[attr-defined]
        arguments = {"headers": headers, "timeout": _TIMEOUT_SECONDS}
        url = huggingface_hub.hf_hub_url(hub_id, name)
        # Streamed: a server that knows no ranges would send the whole file.
        if hasattr(session, "stream"):
            opened = session.stream("GET", url, follow_redirects=True, **arguments)
        else:
            opened = session.get(url, stream=True, **arguments)
        with opened as response:
            utils.hf_raise_for_status(response)  # type: ignore[attr-defined]
            if response.status_code != 206:
                raise OSError(f"it sent all of {name} instead of a part")
            read = response.iter_bytes if hasattr(response, "iter_bytes") else response.iter_content
            return b"".join(read(1 << 16))

    def cache_folder(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)


def _find_in_hub(hub_id: str, hub: Hub, offline: bool) -> Path:
    cached = hub.cached(hub_id, "config.json")
    if offline:
        if cached is None:
            raise ModelNotFoundError(
                f"there is no folder {quote(hub_id)}, and the hub's model of that name is not in the cache "
                f"({hub.cache_folder()}); offline, so nothing was asked of the network",
                _HOW_TO_NAME,
            )
        return cached.parent
    try:
        with _hub_errors(hub_id):
            sizes = hub.sizes(hub_id)
    except _Unreachable as error:
        return _cached_instead(hub_id, hub, error)
    return _download(hub_id, hub, sizes)


def _cached_instead(hub_id: str, hub: Hub, error: _Unreachable) -> Path:
    cached = hub.cached(hub_id, "config.json")
    if cached is None:
        raise ModelNotFoundError(error.message, error.hint) from error
    print(f"spile: {error.message}; using the copy in {cached.parent}", file=sys.stderr)
    return cached.parent


def _download(hub_id: str, hub: Hub, sizes: Mapping[str, int]) -> Path:
    """Download the small files, look at them, and then the weights that they name."""
    texts = [name for name, nbytes in sizes.items() if _is_text(name) and nbytes <= _LARGEST_TEXT_FILE_NBYTES]
    folder = _download_texts(hub_id, hub, sizes)
    weights = _weights(hub_id, folder, sizes)
    _check_disk(hub_id, hub, sizes, weights)
    with _hub_errors(hub_id):
        return hub.download(hub_id, [*texts, *weights])


def _download_texts(hub_id: str, hub: Hub, sizes: Mapping[str, int]) -> Path:
    """Download the small files and check that they are of a model that spile runs."""
    if "config.json" not in sizes:
        found = ", ".join(sorted(sizes)[:5]) or "nothing"
        raise ModelNotFoundError(
            f"the hub's {hub_id} has no config.json, so it is no model; it holds {found}"
        )
    texts = [name for name, nbytes in sizes.items() if _is_text(name) and nbytes <= _LARGEST_TEXT_FILE_NBYTES]
    _check_disk(hub_id, hub, sizes, texts)
    with _hub_errors(hub_id):
        folder = hub.download(hub_id, texts)
    find_model_type(read_config(folder))  # before gigabytes are spent on it
    return folder


def _write_header(hub_id: str, hub: Hub, name: str, nbytes: int, path: Path) -> None:
    """Write a file of a shard's length that holds its header; what the header says is not checked here."""
    with _hub_errors(hub_id):
        start = hub.read_range(hub_id, name, 0, min(nbytes, _USUAL_HEADER_NBYTES))
        end = min(8 + int.from_bytes(start[:8], "little"), nbytes, 8 + LARGEST_HEADER_NBYTES)
        if end > len(start):
            start += hub.read_range(hub_id, name, len(start), end)
        with path.open("wb") as file:
            file.write(start[:end])
            file.truncate(nbytes)


def _weights(hub_id: str, folder: Path, sizes: Mapping[str, int]) -> list[str]:
    present = sorted(name for name in sizes if name.endswith(".safetensors") and "/" not in name)
    if INDEX_NAME in sizes:
        named = sorted(set(read_weight_map(folder / INDEX_NAME).values()))
        missing = [name for name in named if name not in sizes]
        if not missing:
            return named
        if len(missing) < len(named) or "model.safetensors" not in present:
            raise CheckpointError(
                f"the hub's {hub_id} lacks shards that its index names: {', '.join(missing)}"
            )
    if "model.safetensors" in present:
        return ["model.safetensors"]
    if not present:
        raise CheckpointError(f"the hub's {hub_id} has no safetensors weights; spile reads no others")
    return present


def _is_text(name: str) -> bool:
    """Whether a file is config, tokenizer or template; never code, never weights, nothing in a subfolder."""
    if "/" in name or name.endswith((".py", ".safetensors", ".bin")):
        return False
    return name.endswith((".json", ".jinja")) or name in ("merges.txt", "vocab.txt", "tokenizer.model")


def _check_disk(hub_id: str, hub: Hub, sizes: Mapping[str, int], names: Iterable[str]) -> None:
    needed = sum(sizes[name] for name in names if not _is_cached(hub_id, hub, name, sizes[name]))
    folder = hub.cache_folder()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed and free < needed + _RESERVE_NBYTES:
        raise WriteError(
            f"not enough disk to download {hub_id}: needs {needed / 1e6:,.0f} MB, "
            f"{free / 1e6:,.0f} MB are free in {hub.cache_folder()}",
            "Free some room, or set HF_HUB_CACHE to a folder on another disk.",
        )


def _is_cached(hub_id: str, hub: Hub, name: str, nbytes: int) -> bool:
    path = hub.cached(hub_id, name)
    return path is not None and path.exists() and path.stat().st_size == nbytes


class _Unreachable(ModelNotFoundError):
    """The hub did not answer."""


@contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence.

    The classes of its transport differ between its versions (requests, httpx, httpx2), and only some are
    OSError, so everything that is no answer of the hub counts as no connection.
    """
    from huggingface_hub import errors

    try:
        yield
    except SpileError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"the hub wants you to accept the terms of {hub_id} first", f"See https://huggingface.co/{hub_id}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"there is no folder {quote(hub_id)} and no such model on the hub (or it is private)",
            _HOW_TO_NAME,
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and (error.errno in FULL_DISK or error.filename):
            raise WriteError(f"cannot store {hub_id} in the cache: {error.strerror or error}") from error
        reason = quote(str(error).strip().split("\n")[0] or type(error).__name__)
        raise _Unreachable(
            f"there is no folder {quote(hub_id)}, and the hub cannot be reached to look for it ({reason})",
            "Check the connection, or name a folder.",
        ) from error


def _is_offline() -> bool:
    """Whether the environment forbids the network; huggingface_hub has this rule too but reads it once."""
    values = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
    return any(value is not None and value.upper() in ("1", "ON", "YES", "TRUE") for value in values)
