"""What a user may call a model, and that only a hub id is ever asked of the network."""

from __future__ import annotations

import errno
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import errors

from spile.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError, WriteError
from spile.files import hub
from spile.files.checkpoint import open_checkpoint
from spile.files.hub import large_cached_file, resolve, resolve_headers

Tiny = Callable[..., Path]
HUB_ID = "org/maple-tiny"


class FakeHub(hub.Hub):
    """A hub whose only repository is a folder; `asked` lists what it was asked."""

    def __init__(self, repository: Path, cache: Path, error: Exception | None = None) -> None:
        self.repository, self.cache, self.error = repository, cache, error
        self.asked: list[str] = []

    def sizes(self, hub_id: str) -> dict[str, int]:
        self.asked.append("sizes")
        if self.error is not None:
            raise self.error
        return {path.name: path.stat().st_size for path in self.repository.iterdir()}

    def cached(self, hub_id: str, name: str) -> Path | None:
        path = self.cache / name
        return path if path.exists() else None

    def download(self, hub_id: str, names: Iterable[str]) -> Path:
        self.asked.append("download")
        self.cache.mkdir(exist_ok=True)
        for name in names:
            shutil.copyfile(self.repository / name, self.cache / name)
        return self.cache

    def read_range(self, hub_id: str, name: str, start: int, end: int) -> bytes:
        self.asked.append(f"{name} {start}-{end}")
        return (self.repository / name).read_bytes()[start:end]

    def cache_folder(self) -> Path:
        return self.cache


@pytest.fixture
def fake_hub(tiny_checkpoint: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tiny_checkpoint(shards=2), tmp_path / "cache")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "Hub", lambda: fake)
    return fake


# folders


def test_a_folder_is_found_however_it_is_written(
    tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for source in (
        folder,
        str(folder),
        f"{folder}/",
        f"./{folder.name}",
        folder.name,
        f"~/{folder.name}",
        f"{folder.name}/.",
    ):
        assert resolve(source).samefile(folder)


def test_a_relative_folder_of_two_parts_is_no_hub_id(
    tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint()
    monkeypatch.chdir(folder.parent.parent)
    assert resolve(f"{folder.parent.name}/{folder.name}").samefile(folder)


@pytest.mark.parametrize(
    "source",
    ["./nowhere", "../nowhere", "/nowhere/at/all", "~/nowhere", "nowhere", "a/b/c", "org/name/", "",
     " ", "org/na me", "a\0b", "x" * 5000, "~nobody-of-this-name/x", "org/\x1b[2J", "-/x", "org\\name",
     Path("org/name")],
)  # fmt: skip
def test_what_is_no_hub_id_is_not_found_without_network(fake_hub: FakeHub, source: str | Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(source)
    assert "\n" not in str(caught.value)
    assert fake_hub.asked == []


def test_a_missing_folder_says_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("./nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)


def test_a_folder_without_config_lists_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"looked for config\.json, model\.safetensors"):
        resolve(tmp_path)


def test_a_file_is_answered_with_its_folder(tiny_checkpoint: Tiny) -> None:
    folder = tiny_checkpoint()
    with pytest.raises(ModelNotFoundError, match="is a file") as caught:
        resolve(folder / "model.safetensors")
    assert str(folder) in str(caught.value.hint)


def test_nothing_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path)
    with pytest.raises(ModelNotFoundError, match="demo"):
        resolve(None)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(None) == tmp_path


# hub ids


def test_a_hub_id_is_downloaded_without_code_and_strays(fake_hub: FakeHub) -> None:
    for name in ("evil.py", "stray.safetensors", "README.md", "pytorch_model.bin"):
        (fake_hub.repository / name).write_bytes(b"x")
    (fake_hub.repository / "chat_template.jinja").write_text("{{ messages }}")
    folder = resolve(HUB_ID)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }  # fmt: skip


def test_a_stale_index_of_a_repository_is_ignored(fake_hub: FakeHub, tiny_checkpoint: Tiny) -> None:
    for path in fake_hub.repository.glob("*.safetensors"):
        path.unlink()
    shutil.copy(tiny_checkpoint() / "model.safetensors", fake_hub.repository)
    assert [path.name for path in resolve(HUB_ID).glob("*.safetensors")] == ["model.safetensors"]


def test_a_repository_that_lacks_shards_is_refused_before_the_download(fake_hub: FakeHub) -> None:
    (fake_hub.repository / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks shards .*: model-00002-of-00002\.safetensors"):
        resolve(HUB_ID)
    assert not list(fake_hub.cache.glob("*.safetensors"))


def test_an_architecture_that_does_not_run_is_refused_before_its_weights(fake_hub: FakeHub) -> None:
    (fake_hub.repository / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(UnsupportedModelError, match="no_such_type"):
        resolve(HUB_ID)
    assert not list(fake_hub.cache.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("removed", "error", "reason"),
    [
        ("config.json", ModelNotFoundError, "no config.json"),
        ("*.safetensors*", CheckpointError, "no safetensors"),
    ],
)
def test_a_repository_that_is_no_model_is_refused(
    fake_hub: FakeHub, removed: str, error: type[ModelError], reason: str
) -> None:
    for path in fake_hub.repository.glob(removed):
        path.unlink()
    with pytest.raises(error, match=reason):
        resolve(HUB_ID)


def test_too_little_disk_is_refused_before_the_download(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(fake_hub.repository)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=100_000_000))
    with pytest.raises(WriteError, match="not enough disk to download org/maple-tiny"):
        resolve(HUB_ID)
    assert "download" not in fake_hub.asked


def test_files_in_the_cache_need_no_disk(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(HUB_ID)
    usage = shutil.disk_usage(fake_hub.repository)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert resolve(HUB_ID) == fake_hub.cache


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "option"])
def test_offline_uses_the_cache_and_asks_nothing(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how != "option":
        monkeypatch.setenv(how, "1")
    with pytest.raises(ModelNotFoundError, match="offline"):
        resolve(HUB_ID, offline=how == "option")
    shutil.copytree(fake_hub.repository, fake_hub.cache)
    assert resolve(HUB_ID, offline=how == "option") == fake_hub.cache
    assert fake_hub.asked == []


def test_no_connection_is_one_sentence(fake_hub: FakeHub) -> None:
    fake_hub.error = ConnectionError("[Errno -2] Name or service not known\nmore")
    with pytest.raises(ModelNotFoundError, match="cannot be reached") as caught:
        resolve(HUB_ID)
    assert "\n" not in str(caught.value)


def test_no_connection_falls_back_to_the_cache_and_says_so(
    fake_hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(fake_hub.repository, fake_hub.cache)
    fake_hub.error = ConnectionError("down")
    assert resolve(HUB_ID) == fake_hub.cache
    assert "using the copy in" in capsys.readouterr().err


def test_a_full_disk_during_the_download_is_one_sentence(fake_hub: FakeHub) -> None:
    fake_hub.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(WriteError, match="No space left"):
        resolve(HUB_ID)


def hub_error(name: str) -> Exception:
    """Make an error of the library without the answer that its constructor wants."""
    kind: type[Exception] = getattr(errors, name)
    return kind.__new__(kind, "404")


@pytest.mark.parametrize("name", ["RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"])
def test_an_unknown_hub_id_is_not_found(fake_hub: FakeHub, name: str) -> None:
    fake_hub.error = hub_error(name)
    with pytest.raises(ModelNotFoundError, match="no such model on the hub"):
        resolve(HUB_ID)


def test_a_gated_repository_says_where_to_ask(fake_hub: FakeHub) -> None:
    fake_hub.error = hub_error("GatedRepoError")
    with pytest.raises(ModelError, match="accept the terms") as caught:
        resolve(HUB_ID)
    assert "https://huggingface.co/org/maple-tiny" in str(caught.value.hint)


def test_an_empty_cache_of_the_real_library_is_asked_without_network(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="offline"):
        resolve(HUB_ID)  # HF_HUB_OFFLINE is set by conftest


def test_the_library_is_imported_only_for_a_hub_id(
    tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import would raise
    resolve(tiny_checkpoint())


# headers alone


def test_headers_of_a_hub_model_are_read_without_its_weights(fake_hub: FakeHub, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    folder, is_whole = resolve_headers(HUB_ID, room)
    assert (folder, is_whole) == (room, False)
    ours, theirs = open_checkpoint(folder), open_checkpoint(fake_hub.repository)
    assert ours.tensors == theirs.tensors
    assert ours.config == theirs.config
    assert not list(fake_hub.cache.glob("*.safetensors"))
    ranges = [asked for asked in fake_hub.asked if "-" in asked.partition(" ")[2]]
    assert [asked.split()[0] for asked in ranges] == [
        path.name for path in ours.shards
    ]  # one request a shard
    assert [path.stat().st_size for path in ours.shards] == [path.stat().st_size for path in theirs.shards]


def test_long_header_takes_a_second_request(
    fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_USUAL_HEADER_NBYTES", 100)
    folder, _ = resolve_headers(HUB_ID, tmp_path)
    assert open_checkpoint(folder).tensors == open_checkpoint(fake_hub.repository).tensors
    assert sum(" 0-100" in asked for asked in fake_hub.asked) == 2
    assert sum(" 100-" in asked for asked in fake_hub.asked) == 2


def test_headers_of_a_cached_model_are_those_of_the_cache(fake_hub: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(fake_hub.repository, fake_hub.cache)
    assert resolve_headers(HUB_ID, tmp_path) == (fake_hub.cache, True)
    assert not any(".safetensors" in asked for asked in fake_hub.asked)


def test_headers_offline_are_one_sentence(fake_hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="offline, so nothing was asked"):
        resolve_headers(HUB_ID, tmp_path, offline=True)
    assert fake_hub.asked == []
    fake_hub.error = ConnectionError("down")
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        resolve_headers(HUB_ID, tmp_path)


def test_headers_of_a_folder_are_its_own(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    folder = tiny_checkpoint()
    assert resolve_headers(str(folder), tmp_path) == (folder, True)
    assert resolve_headers(folder, tmp_path) == (folder, True)


def test_damaged_header_is_told_as_for_a_folder(fake_hub: FakeHub, tmp_path: Path) -> None:
    shard = next(fake_hub.repository.glob("*.safetensors"))
    shard.write_bytes(bytes([255]) * 1000)
    folder, _ = resolve_headers(HUB_ID, tmp_path)
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


def test_large_cached_file_is_the_largest_blob(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert large_cached_file() is None
    blobs = fake_hub.cache / "models--org--other" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "a").write_bytes(bytes(10))
    (blobs / "b").write_bytes(bytes(20))
    assert large_cached_file() is None
    monkeypatch.setattr(hub, "_LARGE_FILE_NBYTES", 15)
    assert large_cached_file() == blobs / "b"


class RangeServer(BaseHTTPRequestHandler):
    """Serves one file at any path, by ranges unless told not to."""

    content = bytes(range(256)) * 40
    knows_ranges = True

    def do_GET(self) -> None:
        start, end = (int(part) for part in self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.content[start : end + 1] if self.knows_ranges else self.content
        self.send_response(206 if self.knows_ranges else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_range_of_a_file_is_asked_over_http(knows_ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RangeServer, "knows_ranges", knows_ranges)
    with ThreadingHTTPServer(("127.0.0.1", 0), RangeServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/file"
            monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *_: url)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            if knows_ranges:
                assert (
                    hub.Hub().read_range(HUB_ID, "x.safetensors", 100, 2000) == RangeServer.content[100:2000]
                )
            else:
                with pytest.raises(OSError, match=r"sent all of x\.safetensors"):
                    hub.Hub().read_range(HUB_ID, "x.safetensors", 100, 2000)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/deepgrove/maple-2bit-mlx",
        "http://www.huggingface.co/deepgrove/maple-2bit-mlx/",
        "huggingface.co/deepgrove/maple-2bit-mlx/tree/main",
        "https://hf.co/deepgrove/maple-2bit-mlx?library=mlx",
        " https://huggingface.co/deepgrove/maple-2bit-mlx/blob/main/config.json#L3",
    ],
)
def test_address_of_a_models_page_is_its_hub_id(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "_find_in_hub", lambda hub_id, *_: asked.append(hub_id))
    hub.resolve(address)
    assert asked == ["deepgrove/maple-2bit-mlx"]


@pytest.mark.parametrize("name", ["here.gguf", "missing.gguf", "org/name/X.Q4_K_M.GGUF", "org/x.gguf"])
def test_gguf_file_is_refused_with_the_reason_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"names a GGUF file, and spile reads safetensors"):
        hub.resolve(name)
