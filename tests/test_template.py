"""Messages to a prompt, by a program that is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spile.errors import OptionError, TextError
from spile.text.sidecar import read_sidecar
from spile.text.template import render

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
        "{{ 10 ** 10000000 }}",
        "{% set big = 'x' * 10 ** 7 %}{% for i in range(9) %}{{ big }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_damaged_failing_and_escaping_templates_are_one_sentence(template: str) -> None:
    with pytest.raises(TextError, match="the chat template") as caught:
        render(template, USER)
    assert "\n" not in str(caught.value)
    assert USER == [{"role": "user", "content": "Hi"}]


def test_template_that_fills_the_memory_is_one_sentence() -> None:
    class Hungry(dict):  # type: ignore[type-arg]
        def get(self, *arguments: Any) -> Any:
            raise MemoryError

    with pytest.raises(TextError, match=r"^the chat template failed: MemoryError$"):
        render("{{ hungry.get('x') }}", USER, arguments={"hungry": Hungry()})


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
