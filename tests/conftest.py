"""Fixtures that every test file uses: golden models, random checkpoints, and an environment without
surprises."""

from __future__ import annotations

import dataclasses
import itertools
import lzma
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fake_pool import CheckedPool, MakePool
from spile.making.synth import PRESETS, write_checkpoint

if TYPE_CHECKING:
    from serving import Running, Servers

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No option, cache or token of the developer's reaches a test, and nothing reaches a network."""
    for name in list(os.environ):
        if name.startswith(("SPILE_", "HF_", "HUGGING", "XDG_")):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        os, "fsync", lambda file: None
    )  # hundreds of small files need not survive a power cut


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Servers that run until all tests of a file are done."""
    from serving import Servers

    with Servers() as servers:
        yield servers


@pytest.fixture
def says(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Running]:
    """A function that runs a server whose model says a text; one that runs already where that was asked before."""
    from serving import fake_model

    def start(*args: Any, server: dict[str, Any] | None = None, **options: Any) -> Running:
        def load() -> Any:
            return fake_model(tmp_path_factory.mktemp("fake"), *args, **options)

        return servers.once(repr((args, server, options)), load, **(server or {}))

    return start


@pytest.fixture(params=["fake", "pages", "bank"])
def make_pool(request: pytest.FixtureRequest) -> MakePool:
    """What makes a pool in a room of each kind; a bank needs mlx."""
    if request.param == "bank":
        pytest.importorskip("mlx.core", exc_type=ImportError)
    return partial(CheckedPool, request.param)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder with ids{5,60}.npy, logits_{5,60}.npy and the model in mlx-2bit."""
    return GOLDEN


@pytest.fixture(scope="session")
def golden_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unquantized golden model, unpacked."""
    folder = tmp_path_factory.mktemp("golden") / "bf16"
    folder.mkdir()
    for path in (GOLDEN / "bf16").iterdir():
        if path.suffix == ".xz":
            (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, folder / path.name)
    return folder


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a random checkpoint: `tiny_checkpoint(num_experts=4, shards=2)`."""
    numbers = itertools.count()

    def write(*, seed: int = 0, shards: int = 1, group_scales: bool = False, **sizes: Any) -> Path:
        folder = tmp_path / f"tiny-{next(numbers)}"
        shape = dataclasses.replace(PRESETS["tiny"], **sizes)
        write_checkpoint(folder, shape, seed=seed, shards=shards, group_scales=group_scales)
        return folder

    return write
