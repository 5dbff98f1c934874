"""Messages to a prompt, by a program that is not trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spile.errors import OptionError, TextError
from spile.text import renderer
from spile.text.renderer import Renderer
from spile.text.sidecar import read_sidecar

render = Renderer(10**9).render  # one process, started with the first text
USER = [{"role": "user", "content": "Hi"}]
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{% endif %}
"""


def test_blocks_are_trimmed_as_templates_expect() -> None:
    text = render(
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n", USER
    )
    assert text == "user\n"


def test_template_sees_messages_and_special_tokens() -> None:
    text = render(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}|{{ tools }}|{{ absent }}",
        USER,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert text == "<s>Hi</s>|None|"


def test_generation_prompt_and_arguments_of_a_chatml_template() -> None:
    start = "<|im_start|>user\nHi<|im_end|>\n\n"
    assert render(CHATML, USER).startswith(start)
    assert "<think>" not in render(CHATML, USER)
    assert render(CHATML, USER, arguments={"enable_thinking": False}).count("<think>\n\n</think>") == 1
    assert "assistant" not in render(CHATML, USER, add_generation_prompt=False)


def test_json_escapes_nothing_and_keeps_order() -> None:
    value = [{"role": "user", "content": {"b": "<\u05d0>&'", "a": 1}}]
    assert render("{{ messages[0].content | tojson }}", value) == '{"b": "<\u05d0>&\'", "a": 1}'
    assert render("{{ messages[0].content | tojson(indent=1) }}", value) == json.dumps(
        value[0]["content"], ensure_ascii=False, indent=1
    )


def test_loop_controls_generation_blocks_and_dates_work() -> None:
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER)
        == "1"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!", USER) == "Hi!"
    assert render("{{ strftime_now('%Y') | length }}", USER) == "4"


def test_refusal_comes_in_the_words_of_the_template() -> None:
    with pytest.raises(TextError, match=r"^the chat template refuses the messages: No system, please\.$"):
        render("{{ raise_exception('No system,\n please.') }}", USER)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages[0].content",
        "{{ messages.nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ [] | first | upper | nofilter }}",
        "{{ range(10 ** 9) | list }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'secrets' %}",
        "{{ strftime_now(3) }}",
        25 * "{% for a in messages %}" + 25 * "{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{% set big = 'x' * 10 ** 7 %}{% for i in range(9) %}{{ big }}{% endfor %}",
    ],
)
def test_damaged_failing_and_escaping_templates_are_one_sentence(template: str) -> None:
    with pytest.raises(TextError, match="the chat template") as caught:
        render(template, USER)
    assert "\n" not in str(caught.value)
    assert USER == [{"role": "user", "content": "Hi"}]


def test_products_powers_and_loops_of_templates_work() -> None:
    assert render("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 3 * 4 }}{{ 2 ** 0.5 > 1 }}", USER) == "ababab102412True"
    assert render("{% for i in range(1, 4) %}{{ i }}{% endfor %}", USER) == "123"


def config_with(folder: Path, template: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_template_in_the_config_is_found(tmp_path: Path) -> None:
    assert read_sidecar(config_with(tmp_path, "inside")).chat_template == "inside"


def test_template_in_its_own_file_is_found_and_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own \u05d0", encoding="utf-8")
    assert read_sidecar(tmp_path).chat_template == "own \u05d0"
    assert read_sidecar(config_with(tmp_path, "inside")).chat_template == "own \u05d0"


def test_named_templates_default_or_only_one(tmp_path: Path) -> None:
    default, tools = {"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}
    assert read_sidecar(config_with(tmp_path, [tools, default])).chat_template == "d"
    assert read_sidecar(config_with(tmp_path, [tools])).chat_template == "t"
    with pytest.raises(TextError, match="lists 2 chat templates and none is named 'default'"):
        read_sidecar(config_with(tmp_path, [tools, {"name": "rag", "template": "r"}]))


def test_no_template_is_none_and_nonsense_is_refused(tmp_path: Path) -> None:
    assert read_sidecar(tmp_path).chat_template is None
    with pytest.raises(TextError, match="neither text nor a list"):
        read_sidecar(config_with(tmp_path, 3))


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_arguments_that_come_from_the_messages_cannot_be_given(name: str) -> None:
    with pytest.raises(OptionError, match=f"the template argument '{name}' comes from the messages"):
        render("{{ messages }}", USER, arguments={name: []})


def test_tools_and_further_arguments_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}|{{ level }}"
    assert render(template, USER, arguments={"tools": tools, "level": 3}) == json.dumps(tools[0]) + "|3"


TOO_MUCH_MEMORY = [
    "{{ '{:>999999999}'.format('x') }}",
    "{{ 'x'.center(900000000) }}",
    "{{ '%999999999d' % 5 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ messages | tojson(indent=900000000) }}",
    "{{ 'x'.encode() * 3000000000 }}",
    "{{ range(9) | slice(900000000) | list }}",
    "{{ [[]] | batch(900000000, 1) | list }}",
    "{{ 'a b' | replace('', 'y' * 9999999) }}",
    "{{ ['x' * 999999] * 999 | join }}{{ [['x' * 999999] * 999] | map('join') | join }}",
    "{% for i in range(90000) %}{{ 'x' * 9999 }}{% endfor %}",
]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory is looked at now and then")
@pytest.mark.parametrize("template", TOO_MUCH_MEMORY)
def test_template_that_fills_the_memory_is_one_sentence(template: str) -> None:
    with pytest.raises(
        TextError, match=r"^the chat template takes too much memory: it was ended at 24.0 MB$"
    ):
        render(template, USER)
    assert render("{{ messages[0].content }}", USER) == "Hi"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}",
        "{{ 10 ** 100000000 }}",  # within one operation, in which Python looks at no signal
    ],
)
def test_template_that_never_ends_is_one_sentence(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "LIMIT_SECONDS", 0.3)
    hasty = Renderer(10**9)
    with pytest.raises(
        TextError, match=r"^the chat template takes too long: it was ended after 0.3 s of computing$"
    ):
        hasty.render(template, USER)
    assert hasty.render("{{ messages[0].content }}", USER) == "Hi"


def test_process_that_does_not_answer_is_ended_and_another_one_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer, "_WAIT_SECONDS", 0.2)
    stopped = Renderer()
    stopped.start()
    assert stopped._process is not None
    os.kill(stopped._process.pid, signal.SIGSTOP)
    with pytest.raises(TextError, match=r"the chat template takes too long: no answer in 0\.2 s"):
        stopped.render("{{ 1 }}", USER)
    monkeypatch.undo()
    assert stopped.render("{{ 1 }}", USER) == "1"


def test_memory_is_looked_at_where_the_system_sets_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(renderer, "_resident_nbytes", lambda pid: 10**9)
    with pytest.raises(TextError, match="the chat template takes too much memory"):
        Renderer().render("{% for i in range(9999999) %}{% endfor %}" * 9, USER)


def test_process_ends_with_the_one_that_started_it() -> None:
    """However that one ends: nothing tells the other but its standard input."""
    program = (
        "import os, signal\nfrom spile.text.renderer import Renderer\nmade = Renderer()\n"
        "made.render('{{ 1 }}', [])\nprint(made._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    pid, deadline = int(ended.stdout), time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_threads_render_at_once_and_closing_tells_them() -> None:
    shared = Renderer()
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda i: shared.render("{{ n }}", USER, arguments={"n": i}), range(64)))
        assert texts == [str(i) for i in range(64)]
        slow = threads.submit(
            shared.render, "{% for i in range(99999) %}{{ range(9999) | sum }}{% endfor %}", USER
        )
        time.sleep(0.1)
        shared.close()
        with pytest.raises(TextError):
            slow.result()


def test_interrupted_rendering_is_not_taken_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    hurried = Renderer()
    hurried.start()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(renderer._Wait, "until", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hurried.render("{{ 'old' }}", USER)
    assert hurried.render("{{ 'new' }}", USER) == "new"


def test_large_texts_pass_both_ways_and_characters_stay_what_they_are() -> None:
    text = "\u05d0\ud800\x00\U0001f600" * 50_000
    assert Renderer().render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_words_of_a_template_are_one_clean_line() -> None:
    with pytest.raises(TextError) as caught:
        render("{{ raise_exception('\x1b[31mred\u202e \u05d0\n\nline' + 'x' * 5000) }}", USER)
    message = str(caught.value)
    assert message.startswith("the chat template refuses the messages: \\x1b[31mred\\u202e \u05d0 linexxx")
    assert message.isprintable()
    assert len(message) <= 2_100


def test_arguments_that_json_has_no_form_for_are_refused() -> None:
    with pytest.raises(OptionError, match="has no form in JSON: a object"):
        render("{{ x }}", USER, arguments={"x": object()})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(OptionError, match="is nested too deeply"):
        render("{{ x }}", USER, arguments={"x": deep})
