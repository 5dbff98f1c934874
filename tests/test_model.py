"""Loading, order of work, prompts of every kind, and closing; over a scripted engine."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from fakes import FakeEngine, write_byte_tokenizer
from spile.errors import ContextError, OptionError, SpileError, TextError, UnsupportedModelError
from spile.model import Model
from spile.text.sidecar import read_sidecar
from spile.text.tokenizer import open_tokenizer

EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


class Case:
    """A model over a scripted engine, and what happened to it."""

    def __init__(self, folder: Path, script: list[int], *, keep: bool = True, **engine: Any) -> None:
        self.engine = FakeEngine(script, **engine)
        self.notes: list[str] = []
        self.opened = 0
        self.loaded_at_open: bool | None = None
        self.tokenizer = open_tokenizer(folder, config={}, keep=keep)
        self.model = Model(
            open_engine=self.open_engine,
            config={"eos_token_id": EOS},
            sidecar=read_sidecar(folder),
            tokenizer=self.tokenizer,
            plan_context=lambda: self.engine.context,
            vocab_size=self.engine.vocab_size,
            folder=folder,
            on_note=self.notes.append,
        )

    def open_engine(self) -> FakeEngine:
        self.opened += 1
        self.loaded_at_open = self.tokenizer is not None and self.tokenizer.is_loaded
        return self.engine

    @property
    def prompts(self) -> list[bytes]:
        """What the engine was asked, as text."""
        return [bytes(call[1]) for call in self.engine.calls if call[0] == "prefill"]


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    def make(
        text: str = "Hello", *, template: str | None = TEMPLATE, tokenizer: bool = True, **options: Any
    ) -> Case:
        if tokenizer:
            config = {"eos_token": "<|endoftext|>"} | ({"chat_template": template} if template else {})
            write_byte_tokenizer(tmp_path, config=config)
        return Case(tmp_path, [*text.encode(), EOS], **options)

    return make


def test_text_goes_through_the_template_and_comes_back(case: Callable[..., Case]) -> None:
    it = case("Hello \U0001f600")
    completion = it.model.generate("Hi", temperature=0)
    assert completion.text == "Hello \U0001f600"
    assert completion.token_ids == tuple("Hello \U0001f600".encode())
    assert completion.finish_reason == "stop"
    assert completion.stats.completion_tokens == 10
    assert it.prompts == [b"<user>Hi>"]
    assert it.notes == []


def test_stream_and_generate_say_the_same(case: Callable[..., Case]) -> None:
    it = case("e\u0301 \u4f60\u597d")
    chunks = list(it.model.stream("Hi", temperature=0))
    whole = it.model.generate("Hi", temperature=0)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(chunk.token_id for chunk in chunks[:-1]) == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason


def test_system_messages_and_raw(case: Callable[..., Case]) -> None:
    it = case()
    it.model.generate("Hi", system="Be brief.")
    it.model.generate([{"role": "user", "content": "Hi"}], system="Be brief.")
    it.model.generate([{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}])
    it.model.generate("Hi", raw=True)
    it.model.generate([72, 105])
    it.model.generate(np.array([72, 105]))  # type: ignore[arg-type]
    assert it.prompts == [b"<system>Be brief.<user>Hi>"] * 2 + [b"<user>A<assistant>B>"] + [b"Hi"] * 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("Hi", {"raw": True, "system": "x"}, "system needs the chat template"),
        ([{"role": "user", "content": "Hi"}], {"raw": True}, "raw needs a text"),
        ([72], {"system": "x"}, "system is for text"),
        ([], {}, "the prompt is empty"),
        ("", {"raw": True}, "the prompt is empty"),
        (None, {}, "prompt is a NoneType"),
        (b"Hi", {}, "prompt is a bytes"),
        ({"role": "user"}, {}, "prompt is a dict"),
        (["Hi"], {}, r"messages\[0\] is a str"),
        ([300], {}, "token id 300 is none of the model's: they go from 0 to 299"),
        ([-1], {}, "token id -1"),
        ("Hi", {"temperature": -1}, "temperature is -1"),
        ("Hi", {"max_new_tokens": 3}, "no sampling parameter 'max_new_tokens'"),
    ],
)
def test_wrong_prompts_and_options_are_refused_before_any_work(
    prompt: Any, options: dict[str, Any], message: str, case: Callable[..., Case]
) -> None:
    it = case()
    with pytest.raises(OptionError, match=message):
        it.model.stream(prompt, **options)
    assert it.opened == 0


def test_prompt_longer_than_the_context_is_refused_before_any_work(case: Callable[..., Case]) -> None:
    it = case(context=8)
    with pytest.raises(ContextError, match="the prompt has 9 tokens and the context holds 8"):
        it.model.stream("Hi")
    assert it.opened == 0
    with pytest.raises(ContextError, match="the prompt has 9 tokens and fills the context"):
        case(context=9).model.stream("Hi")
    completion = case(context=10).model.generate("Hi")
    assert (completion.stats.prompt_tokens, len(completion.token_ids)) == (9, 1)


def test_model_without_template_takes_the_text_as_it_is_and_says_so(case: Callable[..., Case]) -> None:
    it = case(template=None)
    assert it.model.generate("Hi", temperature=0).text == "Hello"
    assert it.prompts == [b"Hi"]
    assert it.notes == ["this model has no chat template: the prompt is taken as raw text"]
    with pytest.raises(TextError, match="no chat template, and a list of messages needs one"):
        it.model.generate([{"role": "user", "content": "Hi"}])
    with pytest.raises(TextError, match="no chat template, and a system message needs one"):
        it.model.generate("Hi", system="Be brief.")


def test_template_that_refuses_is_heard(case: Callable[..., Case]) -> None:
    it = case(template="{{ raise_exception('no system role') }}")
    with pytest.raises(TextError, match="refuses the messages: no system role"):
        it.model.generate("Hi")
    assert it.opened == 0


def test_folder_without_tokenizer_gives_logits_and_refuses_text(case: Callable[..., Case]) -> None:
    it = case(tokenizer=False)
    assert it.model.tokenizer is None
    assert it.model.logits([1, 2, 3]).shape == (3, 300)
    with pytest.raises(TextError, match=r"has no tokenizer\.json"):
        it.model.generate("Hi")
    completion = it.model.generate([72, 105], temperature=0)  # ids in, ids out
    assert (completion.text, bytes(completion.token_ids)) == ("", b"Hello")
    assert completion.finish_reason == "stop"  # config.json's end token


def test_logits_check_their_ids(case: Callable[..., Case]) -> None:
    it = case(context=4)
    with pytest.raises(OptionError, match="token id 300"):
        it.model.logits([300])
    with pytest.raises(ContextError):
        it.model.logits([1] * 5)
    with pytest.raises(OptionError, match="empty"):
        it.model.logits([])
    assert it.opened == 0
    assert it.model.logits([1] * 4).dtype == np.float32
    assert it.engine.states[0].is_closed


def test_prompt_is_encoded_before_the_engine_opens_and_the_tokenizer_is_gone_by_then(
    case: Callable[..., Case],
) -> None:
    it = case(keep=False)
    assert it.opened == 0
    it.model.generate("Hi")
    assert (it.opened, it.loaded_at_open) == (1, False)
    assert [call[0] for call in it.engine.calls[:1]] == ["prefill"]


def test_later_prompts_borrow_the_pools_memory(case: Callable[..., Case]) -> None:
    it = case(keep=False)
    it.model.generate("Hi")
    it.model.generate("Hi")
    assert it.tokenizer is not None
    lent = [call for call in it.engine.calls if call[0] == "lend"]
    assert lent == [("lend", it.tokenizer.encode_nbytes("<user>Hi>"))]
    assert it.tokenizer.load_nbytes > 0
    assert it.opened == 1


def test_tokenizer_that_is_kept_borrows_nothing(case: Callable[..., Case]) -> None:
    it = case(keep=True)
    it.model.generate("Hi")
    it.model.generate("Hi")
    assert not [call for call in it.engine.calls if call[0] == "lend"]


def test_ids_first_borrow_only_for_reading_the_vocabulary(case: Callable[..., Case]) -> None:
    it = case(keep=False)
    it.model.logits([1])
    it.model.generate([72], temperature=0)
    it.model.generate([72], temperature=0)
    assert [call[0] for call in it.engine.calls].count("lend") == 1
    assert it.tokenizer is not None
    assert not it.tokenizer.is_loaded


def test_rows_of_the_head_past_the_tokenizer_are_never_sampled(case: Callable[..., Case]) -> None:
    it = case()
    it.engine.script = [280, 299, EOS]
    assert it.model.generate("Hi", max_tokens=2, temperature=0).token_ids == (0, 0)


def test_tokenizer_of_another_model_is_refused(case: Callable[..., Case]) -> None:
    it = case(vocab_size=100)
    with pytest.raises(TextError, match="the tokenizer gave token 117 and the model has 100 tokens"):
        it.model.generate("Hi", raw=False)


def test_defaults_come_from_generation_config(case: Callable[..., Case], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": "x"}))
    it = case()
    assert it.model.sampling == spile.Sampling(temperature=0.3)
    assert [note.split(" is ")[0] for note in it.notes] == ["generation_config.json: top_k"]


def test_interrupted_stream_leaves_the_model_usable(case: Callable[..., Case]) -> None:
    it = case()
    stream = it.model.stream("Hi", temperature=0)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert it.engine.states[0].is_closed
    assert it.model.generate("Hi", temperature=0).text == "Hello"


def test_closing_closes_everything_once_and_use_after_it_is_an_error(case: Callable[..., Case]) -> None:
    it = case()
    with it.model as model:
        model.generate("Hi")
    assert it.engine.is_closed
    model.close()
    for use in (
        lambda: model.generate("Hi"),
        lambda: model.logits([1]),
        lambda: model.encode("a"),
        model.open,
    ):
        with pytest.raises(SpileError, match="this model was closed"):
            use()


def test_stream_of_a_closed_model_is_an_error(case: Callable[..., Case]) -> None:
    it = case()
    stream = it.model.stream("Hi")
    it.model.close()
    with pytest.raises(SpileError, match="this model was closed"):
        next(stream)


def test_public_names_are_what_all_says_and_cost_nothing_until_used() -> None:
    assert sorted(spile.__all__) == spile.__all__
    assert all(getattr(spile, name) is not None for name in spile.__all__)
    assert set(dir(spile)) == set(spile.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spile.nothing  # type: ignore[attr-defined]
    code = "import sys, spile; print({'numpy', 'tokenizers', 'jinja2', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_defaults_of_load_are_those_of_the_engine() -> None:
    from spile.options import EngineOptions

    defaults = {name: item.default for name, item in inspect.signature(spile.load).parameters.items()}
    options = EngineOptions()
    for name in ("threads", "io", "kv_bits", "context", "prefill_chunk", "activation_bytes"):
        assert defaults[name] == getattr(options, name)
    assert defaults["memory"] is options.memory_bytes is None


def test_load_opens_headers_only_and_runs_no_code_of_the_folder(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoint()
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    notes: list[str] = []
    with spile.load(folder, on_note=notes.append) as model:
        assert model.vocab_size == config["vocab_size"]
        assert model.summary is None
    assert any("model_file" in note for note in notes)
    assert not marker.exists()


def test_notes_are_warnings_where_nobody_asked_for_them(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
    with pytest.warns(UserWarning, match="model_file"):
        spile.load(folder).close()


def test_small_bf16_source_is_packed_into_a_folder_that_goes(golden_bf16: Path) -> None:
    notes: list[str] = []
    with spile.load(golden_bf16, on_note=notes.append) as model:
        packed = [note for note in notes if "packed to 2 bits in a temporary folder" in note]
        assert len(packed) == 1
        assert model.folder == golden_bf16


def test_large_bf16_source_is_refused_with_the_command_to_run(
    golden_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.loading._LARGEST_CONVERTED_NBYTES", 1000)
    with pytest.raises(UnsupportedModelError) as caught:
        spile.load(golden_bf16)
    assert f"spile convert {golden_bf16} NEW_FOLDER" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "lots"}, "memory 'lots'"),
        ({"memory": "0"}, "memory '0'"),
        ({"memory": 0}, "memory is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"io": "fast"}, "io is 'fast'"),
        ({"kv_bits": 6}, "kv_bits is 6"),
        ({"kv_v_bits": 3}, "kv_v_bits is 3"),
        ({"prefill_chunk": -1}, "prefill_chunk is -1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: dict[str, Any], message: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(OptionError, match=message):
        spile.load(tiny_checkpoint(), **options)


THINKING = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments.a }}){% endfor %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ note }}>"
)


def test_tools_calls_and_results_reach_the_template(case: Callable[..., Case]) -> None:
    it = case(template=THINKING)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    it.model.generate(history, tools=[{"name": "add"}])
    assert it.prompts == [b'[{"name": "add"}]<user>1+1?<assistant>(add 1)<tool>2>']


def test_template_arguments_reach_the_template(case: Callable[..., Case]) -> None:
    it = case(template=THINKING)
    it.model.generate("Hi", template_arguments={"note": "n"})
    it.model.generate("Hi", think=False)
    it.model.generate("Hi", think=False, template_arguments={"enable_thinking": True})
    assert it.prompts == [b"<user>Hin>", b"<user>Hi<think></think>>", b"<user>Hi>"]
    assert it.notes == []


def test_reasoning_is_beside_the_text(case: Callable[..., Case]) -> None:
    it = case("<think>\nHm.\n</think>\n\nYes.", template=THINKING)
    assert it.model.can_reason
    completion = it.model.generate("Hi", temperature=0)
    assert (completion.reasoning, completion.text) == ("Hm.", "Yes.")
    assert it.model.generate("Hi", raw=True, temperature=0).text == "<think>\nHm.\n</think>\n\nYes."
    chunks = list(it.model.stream("Hi", temperature=0))
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
    assert "".join(chunk.text for chunk in chunks) == "Yes."


def test_template_that_begins_the_reasoning_is_understood(case: Callable[..., Case]) -> None:
    it = case("Hm.</think>Yes.", template=TEMPLATE + "<think>\n")
    completion = it.model.generate("Hi", temperature=0)
    assert (completion.reasoning, completion.text) == ("Hm.", "Yes.")


def test_model_without_markers_is_not_split(case: Callable[..., Case]) -> None:
    it = case("<think>a</think>b")
    assert not it.model.can_reason
    assert it.model.generate("Hi", temperature=0).text == "<think>a</think>b"


def test_reasoning_without_a_switch_is_told(case: Callable[..., Case]) -> None:
    it = case(template=TEMPLATE + "<think>")
    it.model.generate("Hi", think=False)
    assert "no switch for its reasoning" in it.notes[0]


def test_stop_and_bias_of_a_whole_answer(case: Callable[..., Case]) -> None:
    it = case("alpha beta gamma")
    completion = it.model.generate("Hi", temperature=0, stop=["ta ga", "zz"], logprobs=1)
    assert (completion.text, completion.finish_reason, completion.stopped_by) == ("alpha be", "stop", "ta ga")
    assert [one.token_id for one in completion.logprobs] == list(completion.token_ids)
    banned = it.model.generate("Hi", temperature=0, logit_bias={ord("a"): -100}, max_tokens=1)
    assert banned.token_ids == (0,)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("Hi", {"raw": True, "tools": [{}]}, "tools needs the chat template"),
        ([72], {"tools": [{}]}, "tools is for text"),
        ("Hi", {"tools": "add"}, "tools is a str"),
        ("Hi", {"logit_bias": {300: 1}}, "logit_bias names token id 300, none of the model's"),
        ("Hi", {"template_arguments": {"messages": []}}, "the template argument 'messages'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "is of type 'image_url'"),
    ],
)
def test_further_wrong_options_are_refused_before_any_work(
    prompt: Any, options: dict[str, Any], message: str, case: Callable[..., Case]
) -> None:
    it = case()
    with pytest.raises(OptionError, match=message):
        it.model.stream(prompt, **options)
    assert it.opened == 0


def test_stop_without_a_tokenizer_is_refused(case: Callable[..., Case]) -> None:
    it = case(tokenizer=False)
    with pytest.raises(OptionError, match="stop needs text, and this model has no tokenizer"):
        it.model.stream([72], stop="a")


def test_same_prompt_again_is_held_but_for_its_last_token(case: Callable[..., Case]) -> None:
    it = case()
    held = it.model.hold()
    answers = [it.model.generate("Hi", temperature=0, held=held) for _ in range(3)]
    assert {answer.text for answer in answers} == {"Hello"}
    assert [answer.stats.cached_tokens for answer in answers] == [0, 8, 8]
    assert {answer.stats.prompt_tokens for answer in answers} == {9}
    assert it.prompts == [b"<user>Hi>", b">", b">"]


def test_answer_in_other_pieces_than_its_texts_is_read_again(tmp_path: Path) -> None:
    """'ab' is one entry, but the model said 'a' and 'b': a fresh state would read the entry."""
    write_byte_tokenizer(tmp_path, merges=[("a", "b")])
    it = Case(tmp_path, [*b"ab", EOS])
    held = it.model.hold()
    options: dict[str, Any] = {"raw": True, "temperature": 0, "max_tokens": 2}
    first = it.model.generate("x", held=held, **options)
    assert (first.text, first.token_ids) == ("ab", tuple(b"ab"))
    second = it.model.generate("xaby", held=held, **options)
    assert second.stats.cached_tokens == 1
    fresh = it.model.encode("xaby", raw=True)
    assert len(fresh) == 3
    assert held.token_ids[: held.num_prompt] == fresh
    assert it.engine.states[0].fed[:3] == fresh


def test_closing_the_model_closes_what_is_held(case: Callable[..., Case]) -> None:
    it = case()
    held = it.model.hold()
    it.model.generate("Hi", held=held)
    assert not it.engine.states[0].is_closed
    it.model.close()
    assert it.engine.states[0].is_closed


def test_template_of_a_file_replaces_the_models_own(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ raise_exception('mine: ' + messages[0].content) }}")
    with (
        spile.load(tiny_checkpoint(), chat_template=path) as model,
        pytest.raises(TextError, match="refuses the messages: mine: Hi"),
    ):
        model.generate("Hi")
    with pytest.raises(TextError, match="there is no chat template"):
        spile.load(tiny_checkpoint(), chat_template=tmp_path / "none.jinja")
    path.write_bytes(b"\xff")
    with pytest.raises(TextError, match=r"mine\.jinja is not UTF-8"):
        spile.load(tiny_checkpoint(), chat_template=path)


# -- bounds --


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spile.load(golden / "mlx-2bit") as model:
        assert model.tokenizer is not None
        monkeypatch.setattr(model.tokenizer, "encode", lambda text: pytest.fail("it was encoded"))
        with pytest.raises(spile.ContextError, match=r"400,000 characters.* holds 256"):
            model.generate("x" * 400_000, raw=True)


def test_second_thread_is_told_that_the_model_is_busy(golden: Path) -> None:
    with spile.load(golden / "mlx-2bit") as model:
        stream = model.stream("once", raw=True, max_tokens=3)
        errors: list[BaseException] = []

        def other() -> None:
            try:
                model.generate("twice", raw=True, max_tokens=1)
            except spile.SpileError as error:
                errors.append(error)

        with model._alone():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert "another thread" in str(errors[0])
        assert len(list(stream)) >= 3


def test_mapping_more_than_the_budget_is_refused(golden: Path) -> None:
    with (
        spile.load(golden / "mlx-2bit", memory=1_000_000, io="mapped") as model,
        pytest.raises(spile.BudgetError, match="mapped whole"),
    ):
        model.logits([1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", b"1GB"), ("memory", 1e9), ("threads", "2"), ("threads", 2.0), ("context", "7"),
        ("prefill_chunk", [1]), ("kv_bits", 16.0), ("kv_bits", [16]), ("io", 3), ("activation_bytes", True),
        ("source", 5), ("source", b"x"), ("chat_template", 5),
    ],
)  # fmt: skip
def test_parameter_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"^{name} is {re.escape(repr(value))}: it must be"):
        spile.load(**{name: value})


def test_token_ids_of_another_type_are_refused(golden: Path) -> None:
    with spile.load(golden / "mlx-2bit") as model:
        for ids in (["a"], [1.5], [None], [True], "ab"):
            with pytest.raises(OptionError, match="is no whole number"):
                model.logits(ids)  # type: ignore[arg-type]
        for none in (None, 5):
            with pytest.raises(OptionError, match="it must be a list of token ids"):
                model.logits(none)  # type: ignore[arg-type]
        assert model.logits(np.array([1, 2])).shape == (2, model.vocab_size)  # type: ignore[arg-type]
        for prompt in (5, None, 1.5, b"x", iter([1])):
            with pytest.raises(OptionError, match="it must be text, messages or token ids"):
                model.stream(prompt)  # type: ignore[arg-type]
        with pytest.raises(SpileError):
            model.stream([1.5])  # type: ignore[list-item]
        for memory in (b"x", 1.5, None, 0):
            with pytest.raises(OptionError, match="memory is"):
                model.resize(memory)  # type: ignore[arg-type]


def test_closed_model_is_not_entered(golden: Path) -> None:
    model = spile.load(golden / "mlx-2bit")
    model.close()
    with pytest.raises(SpileError, match="was closed"), model:
        pass


def test_context_beyond_the_model_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(max_position_embeddings=256)
    with pytest.raises(OptionError, match="context is 1,000: this model can have at most 256 tokens"):
        spile.load(folder, context=1000)
    with spile.load(folder, context=256) as model:
        assert model.context == 256


def test_model_that_names_no_end_token_says_so_once(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, special=("<s>",), config={"chat_template": TEMPLATE})
    case = Case(tmp_path, [*b"Hello"])
    case.model._config = {}
    for _ in range(2):
        case.model.generate("Hi", max_tokens=3)
    assert [note for note in case.notes if "no end token" in note] == [
        "this model's files name no end token: an answer ends at a stop text or its limit alone"
    ]


def test_tokenizer_without_some_bytes_says_so_once(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, config={"eos_token": "<|endoftext|>"})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for lost in ("7", "\u00c3"):  # a digit, and the first byte of many letters
        del content["model"]["vocab"][lost]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    case = Case(tmp_path, [*b"Hello", EOS])
    assert case.model.encode("a7", raw=True) == case.model.encode("a", raw=True)
    assert [note for note in case.notes if "no entry" in note] == [
        "this tokenizer has no entry for 2 bytes: texts lose the characters that have them"
    ]
