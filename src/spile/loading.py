"""Turns a model's name into an object that answers: `spile.load(...)`.

It finds the files, checks what was asked against them, and chooses the engine. It does not know prompts.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from spile.errors import OptionError, TextError, UnsupportedModelError, quote
from spile.generation.prompt_reuse import PromptReuse
from spile.model import Model, warn_of
from spile.options import PROMPT_FOLDER_LIMIT
from spile.sizes import format_size, parse_budget, parse_size
from spile.text.prompts import OnNote
from spile.text.renderer import Renderer, reserved_nbytes
from spile.text.sidecar import read_sidecar, read_text
from spile.text.tokenizer import open_tokenizer

if TYPE_CHECKING:
    from spile.architectures.foreign import ForeignModel
    from spile.architectures.spec import OwnModel
    from spile.engines.base import Engine
    from spile.options import EngineOptions

AnyModel: TypeAlias = "OwnModel | ForeignModel"

_LARGEST_CONVERTED_NBYTES = 64_000_000  # a bf16 source this small, once packed, is converted on the fly
_PACKED_PART = 0.3  # of bf16: 4-bit tables with their scales take 0.28, ternary rows 0.13


def load(
    source: str | Path | None = None,
    *,
    memory: int | str | None = None,
    threads: int | None = None,
    engine: str = "auto",
    io: str = "auto",
    kv_bits: int = 16,
    kv_v_bits: int | None = None,
    kv_ring_bits: int | None = None,
    context: int | None = None,
    prefill_chunk: int | None = None,
    activation_bytes: int = 2,
    flash_moe: bool = False,
    active_experts: int | None = None,
    shared_experts: int = 0,
    reselect_every: int = 1,
    flash_head: bool = False,
    sequences: int = 1,
    prompt_cache_bytes: int = 0,
    reserved_bytes: int = 0,
    prompt_cache: str | Path | None = None,
    prompt_cache_limit: int | str = PROMPT_FOLDER_LIMIT,
    chat_template: str | Path | None = None,
    parse_special: bool = False,
    offline: bool = False,
    on_note: OnNote | None = None,
) -> Model:
    """Open a model: a folder, a hub id (downloaded once), or None for the demo model that comes with spile.

    `memory` bounds the resident memory of the whole process (bytes, or a size such as "630MB"); None takes
    what the machine has. `threads` None means the physical cores. `io` is auto, buffered, direct or mapped;
    `kv_bits` 32, 16, 8 or 4 for keys and values, `kv_v_bits` for values alone, `kv_ring_bits` for both in layers
    with a sliding window (16 unless said); `activation_bytes` 3 is for comparisons. `chat_template` is a file with a
    Jinja template to use instead of the model's own. With `parse_special` a mark such as `<|im_end|>` that stands in a
    message counts as one; else it is text. `prompt_cache_bytes` of the budget keep what was read of earlier
    prompts, so that one that begins alike is not read again, and `reserved_bytes` of it are left to the caller;
    a folder `prompt_cache` keeps prompts across runs, up to `prompt_cache_limit`. `flash_moe`,
    `active_experts`, `shared_experts` and `reselect_every` size the pool by experts a layer instead of bytes
    (docs/write-up.md). Headers and configs are read and checked now; weights with the first use. Notes, one
    line each, go to `on_note`, by default to `warnings`.

    Raises:
        ModelError: no such model, damaged or contradictory files, or an architecture that spile does not run.
        OptionError: a parameter out of range.
        TextError: a damaged tokenizer_config.json, or a template file that is missing or damaged.
    """
    from spile.architectures import open_model
    from spile.architectures.spec import OwnModel
    from spile.files.checkpoint import open_checkpoint
    from spile.files.hub import resolve
    from spile.making.convert import is_source

    for name, value in (("source", source), ("chat_template", chat_template), ("prompt_cache", prompt_cache)):
        if value is not None and not isinstance(value, (str, Path)):
            raise OptionError(f"{name} is {quote(value)}: it must be a text or a Path")
    budget_bytes = parse_budget(memory) if isinstance(memory, str) or type(memory) is int else memory
    options = _engine_options(
        memory_bytes=budget_bytes,
        engine=engine,
        threads=threads,
        io=io,
        kv_bits=kv_bits,
        kv_v_bits=kv_v_bits,
        kv_ring_bits=kv_ring_bits,
        context=context,
        prefill_chunk=prefill_chunk,
        activation_bytes=activation_bytes,
        flash_moe=flash_moe,
        active_experts=active_experts,
        shared_experts=shared_experts,
        reselect_every=reselect_every,
        flash_head=flash_head,
        sequences=sequences,
        prompt_cache_bytes=prompt_cache_bytes,
        reserved_bytes=reserved_bytes,
    )
    tell = on_note or warn_of
    with ExitStack() as cleanup:
        folder = resolve(source, offline=offline)
        sidecar = read_sidecar(folder)
        if chat_template is not None:
            template = read_text(Path(chat_template).expanduser(), hint="Save the template as UTF-8.")
            if template is None:
                raise TextError(f"there is no chat template {chat_template}")
            sidecar = replace(sidecar, chat_template=template)
        renderer = Renderer(budget_bytes)
        cleanup.callback(renderer.close)
        if sidecar.chat_template is not None and os.path.lexists(folder / "tokenizer.json"):
            reserved = options.reserved_bytes + reserved_nbytes(budget_bytes)
            options = replace(options, reserved_bytes=reserved)
            renderer.start()  # to be ready when the rest is
        checkpoint = open_checkpoint(folder)
        opened = open_model(checkpoint)
        options.check_context(opened.spec.max_position_embeddings)
        for note in checkpoint.notes:
            tell(note)
        if isinstance(opened, OwnModel):
            options.check_experts(opened.spec.num_experts, opened.spec.num_experts_per_tok)
            if is_source(opened):
                opened = _convert(opened, cleanup, tell)
        _check_engine(opened, options)
        tokenizer = open_tokenizer(folder, sidecar, config=checkpoint.config, keep=budget_bytes is None)
        prompts = _prompts(opened, options, prompt_cache, prompt_cache_limit, tell)
        return Model(
            open_engine=lambda: _open_engine(opened, options),
            config=checkpoint.config,
            sidecar=sidecar,
            tokenizer=tokenizer,
            plan_context=lambda: _plan_context(opened, options),
            vocab_size=opened.spec.vocab_size,
            folder=folder,
            memory_bytes=budget_bytes,
            prompts=prompts,
            renderer=renderer,
            parse_special=parse_special,
            on_note=tell,
            resources=cleanup.pop_all(),
        )


def _engine_options(**values: Any) -> EngineOptions:
    from spile.options import EngineOptions

    return EngineOptions(**values)


def _prompts(
    opened: AnyModel, options: EngineOptions, folder: str | Path | None, limit: int | str, tell: OnNote
) -> PromptReuse:
    from spile.files.fingerprint import fingerprint

    limit_nbytes = parse_size(limit, name="prompt_cache_limit") if isinstance(limit, str) else limit
    if isinstance(limit_nbytes, bool) or not isinstance(limit_nbytes, Integral) or limit_nbytes < 1:
        raise OptionError(f"prompt_cache_limit is {quote(limit)}: it must be bytes, or a size such as '2GB'")
    every = options.reselect_every
    return PromptReuse(
        lambda: fingerprint(opened.checkpoint),
        budget_nbytes=options.prompt_cache_bytes,
        folder=None if folder is None else Path(folder).expanduser(),
        limit_nbytes=limit_nbytes,
        obstacle=None if every == 1 else f"with reselect_every {every} a token depends on more than its text",
        on_note=tell,
    )


def _check_engine(opened: AnyModel, options: EngineOptions) -> None:
    """Check that there is an engine for a model, before anything is read for it."""
    from spile.engines import choose_engine

    if choose_engine(opened, options) == "mlx":
        from spile.engines.mlx.adapter import require

        require()


def _open_engine(opened: AnyModel, options: EngineOptions) -> Engine:
    from spile.engines import open_engine

    return open_engine(opened, options)


def _plan_context(opened: AnyModel, options: EngineOptions) -> int:
    from spile.architectures.spec import OwnModel
    from spile.engines import choose_engine
    from spile.residency.experts import ExpertTable
    from spile.residency.plan import make_plan

    if choose_engine(opened, options) == "mlx":  # which plans with the model at hand, and checks again
        return options.context or opened.spec.max_position_embeddings
    assert isinstance(opened, OwnModel), "the cpu engine was chosen"
    import spile.engines.cpu.engine  # noqa: F401  (what it takes is in the plan that it makes itself)

    return make_plan(opened, ExpertTable(opened), options).context


def _convert(source: OwnModel, cleanup: ExitStack, tell: OnNote) -> OwnModel:
    """Convert a small bf16 source into a temporary folder, which goes when `cleanup` closes; refuse a large
    one.
    """
    from spile.architectures import open_own
    from spile.files.checkpoint import open_checkpoint
    from spile.making.convert import convert_folder

    folder = source.checkpoint.folder
    packed_nbytes = int(_PACKED_PART * sum(tensor.nbytes for tensor in source.checkpoint.tensors.values()))
    if packed_nbytes >= _LARGEST_CONVERTED_NBYTES:
        raise UnsupportedModelError(
            f"{folder} holds the bf16 weights of training, and spile runs them packed to 2 bits",
            f"Convert them once: spile convert {folder} NEW_FOLDER",
        )
    size = format_size(packed_nbytes)
    tell(f"{folder} holds bf16 weights: they are packed to 2 bits in a temporary folder ({size})")
    temporary = cleanup.enter_context(TemporaryDirectory(prefix="spile-"))
    packed = Path(temporary) / "model"
    convert_folder(folder, packed)
    return open_own(open_checkpoint(packed))
