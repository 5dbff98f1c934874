"""What clients get, by OpenAI's own client and by hand, from models that say what is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

import spile
from fakes import FakeEngine
from scripted import write_scripted
from serving import EOS, Running, Servers, running
from spile.memory import current_memory_bytes

USER = [{"role": "user", "content": "Hi"}]
ENDS_IN_X = "{% for m in messages %}{{ m.content }}{% endfor %}x"
SCRIPT = [b"al", b"pha be", b"ta ga", b"mma", b"!"]


@pytest.fixture
def scripted(servers: Servers, tiny_checkpoint: Callable[..., Path]) -> Callable[..., Running]:
    """What `says` is, of the real engine, which walks a script."""

    def start(script: list[bytes], **options: Any) -> Running:
        def load() -> spile.Model:
            folder, _ = write_scripted(tiny_checkpoint, script, template=ENDS_IN_X, **options)
            return spile.load(folder, on_note=lambda note: None)

        return servers.once(repr((script, options)), load)

    return start


def stream_text(frames: list[Any]) -> str:
    """Join the deltas of a stream of either endpoint."""
    choices = [frame["choices"][0] for frame in frames if frame != "[DONE]" and frame["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def reasons(frames: list[Any]) -> list[str]:
    choices = [choice for frame in frames if frame != "[DONE]" for choice in frame["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def test_openai_client_chats(says: Callable[..., Running]) -> None:
    client = says("Hello \U0001f600").client
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].message.content == "Hello \U0001f600"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == len("<user>Hi>")
    assert answer.usage.completion_tokens == len("Hello \U0001f600".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_client_streams_the_same(says: Callable[..., Running]) -> None:
    client = says("Hello \U0001f600").client
    chunks = list(client.chat.completions.create(model="tiny", messages=USER, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello \U0001f600"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_client_completes(says: Callable[..., Running]) -> None:
    client = says("Hello").client
    answer = client.completions.create(model="tiny", prompt="Say ")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "stop")
    chunks = list(client.completions.create(model="tiny", prompt="Say ", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"


def test_openai_client_lists_the_model(says: Callable[..., Running]) -> None:
    client = says(server={"model_ids": ("org/tiny", "tiny")}).client
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", ["org/tiny", "tiny", None])
def test_any_name_of_the_model_is_answered_by_its_id(
    says: Callable[..., Running], path: str, name: str | None
) -> None:
    server = says(server={"model_ids": ("org/tiny", "tiny")})
    prompt = {"messages": USER} if "chat" in path else {"prompt": "Hi"}
    reply = server.send(path, prompt | ({} if name is None else {"model": name}))
    assert (reply.status, reply.body["model"]) == (200, "org/tiny")


def test_other_models_are_not_found_and_the_one_there_is_is_named(says: Callable[..., Running]) -> None:
    server = says()
    for reply in (
        server.send("/v1/chat/completions", {"messages": USER, "model": "gpt-4"}),
        server.send("/v1/models/gpt-4"),
    ):
        assert reply.status == 404
        assert reply.body["error"]["code"] == "model_not_found"
        assert "tiny" in reply.body["error"]["message"]
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="gpt-4", messages=USER)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_a_stream_comes_once_and_last_and_only_when_asked_for(
    says: Callable[..., Running], path: str
) -> None:
    server = says("Hello")
    body: dict[str, Any] = {"messages": USER} if "chat" in path else {"prompt": "Hi"}
    whole = server.send(path, body).body["usage"]
    frames = server.frames(path, {**body, "stream_options": {"include_usage": True}})
    assert frames[-1] == "[DONE]"
    assert frames[-2]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert frames[-2]["usage"][name] == whole[name]
    assert [frame["usage"] for frame in frames[:-2]] == [None] * len(frames[:-2])
    for options in ({}, {"stream_options": {"include_usage": False}}):
        for frame in server.frames(path, {**body, **options})[:-1]:
            assert frame.get("usage") is None
            assert len(frame["choices"]) == 1


def test_what_an_answer_took_is_in_its_usage(says: Callable[..., Running]) -> None:
    took = says("Hello").send("/v1/chat/completions", {"messages": USER}).body["usage"]["spile"]
    assert (took["hits"], took["misses"], took["bytes_read"]) == (15, 5, 500)  # of five decodes
    assert took["hit_rate"] == 0.75
    assert took["exact"] is True
    assert took["compute_seconds"] > 0
    assert took["stall_seconds"] == 0
    assert took["cached_tokens"] == 0
    assert took["peak_memory_bytes"] >= took["memory_bytes"] // 2


@pytest.mark.parametrize("stop", ["ha beta g", ["zz", "qq", "ha beta g", "never"]])
def test_stop_across_tokens_cuts_before_it_streamed_and_not(
    scripted: Callable[..., Running], stop: Any
) -> None:
    server = scripted(SCRIPT)
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        asked = {**body, "stop": stop}
        choice = server.send(path, asked).body["choices"][0]
        assert choice.get("text", choice.get("message", {}).get("content")) == "alp"
        assert choice["finish_reason"] == "stop"
        frames = server.frames(path, asked)
        assert stream_text(frames) == "alp"
        assert reasons(frames) == ["stop"]


def test_null_stop_is_none(scripted: Callable[..., Running]) -> None:
    server = scripted(SCRIPT)
    reply = server.send("/v1/completions", {"prompt": "x", "stop": None})
    assert reply.body["choices"][0]["text"] == "alpha beta gamma!"


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 3, "max_completion_tokens": 2}, 2),
    ],
)
def test_limit_ends_an_answer_with_length(
    scripted: Callable[..., Running], limits: dict[str, int], tokens: int
) -> None:
    server = scripted(SCRIPT)
    body = {"messages": [{"role": "user", "content": ""}], **limits}
    reply = server.send("/v1/chat/completions", body).body
    text = b"".join(SCRIPT[:tokens]).decode()
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == (
        text,
        "length",
    )
    assert reply["usage"]["completion_tokens"] == tokens
    frames = server.frames("/v1/chat/completions", body)
    assert (stream_text(frames), reasons(frames)) == (text, ["length"])


def test_answer_without_a_limit_goes_on_to_its_end(says: Callable[..., Running]) -> None:
    server = says("abcdefghij" * 150)
    reply = server.send("/v1/chat/completions", {"messages": USER}).body
    assert reply["usage"]["completion_tokens"] == 1500
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_limit_of_the_server_is_for_requests_that_have_none(says: Callable[..., Running]) -> None:
    server = says("abcdefghij", server={"defaults": {"max_tokens": 4}})
    assert server.send("/v1/completions", {"prompt": "x"}).body["usage"]["completion_tokens"] == 4
    asked = {"prompt": "x", "max_tokens": 6}
    assert server.send("/v1/completions", asked).body["usage"]["completion_tokens"] == 6


def test_characters_in_pieces_arrive_whole(scripted: Callable[..., Running]) -> None:
    text = "\U0001f1e9\U0001f1ea \U0001f468‍\U0001f469‍\U0001f467 é שלום 漢字  two"
    data = text.encode()
    cuts = [0, 1, 3, 9, 12, 14, 20, 24, 29, 31, 34, 39, 41, len(data)]
    script = [data[start:end] for start, end in pairwise(cuts)]
    server = scripted(script)
    body = {"prompt": "x"}
    assert server.send("/v1/completions", body).body["choices"][0]["text"] == text
    frames = server.frames("/v1/completions", body)
    assert stream_text(frames) == text
    assert "�" not in json.dumps(frames, ensure_ascii=False)


def test_same_request_three_times_says_the_same(scripted: Callable[..., Running]) -> None:
    server = scripted(SCRIPT)
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcd" * 10}]}),
        ("/v1/completions", {"prompt": "abcd" * 10 + "x"}),
    ):
        replies = [server.send(path, body).body for _ in range(3)]
        texts = [stream_text(server.frames(path, body)) for _ in range(3)]
        texts += [
            str(r["choices"][0].get("text", r["choices"][0].get("message", {}).get("content")))
            for r in replies
        ]
        assert texts == ["alpha beta gamma!"] * 6
        assert len({reply["usage"]["prompt_tokens"] for reply in replies}) == 1


def test_n_answers_and_several_prompts(says: Callable[..., Running]) -> None:
    server = says("Hello")
    reply = server.send("/v1/chat/completions", {"messages": USER, "n": 3}).body
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Hello"}
    assert reply["usage"]["prompt_tokens"] == 9
    assert reply["usage"]["completion_tokens"] == 15
    reply = server.send("/v1/completions", {"prompt": ["a", "bcd"], "n": 2}).body
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 4
    reply = server.send("/v1/completions", {"prompt": [72, 105]}).body
    assert reply["usage"]["prompt_tokens"] == 2
    frames = server.frames("/v1/chat/completions", {"messages": USER, "n": 2})
    for index in (0, 1):
        mine = [frame for frame in frames[:-1] if frame["choices"][0]["index"] == index]
        assert stream_text(mine) == "Hello"
        assert mine[0]["choices"][0]["delta"]["role"] == "assistant"
        assert reasons(mine) == ["stop"]


def test_seeds_repeat_and_answers_of_one_request_differ(golden: Path) -> None:
    body = {"prompt": "x", "seed": 7, "max_tokens": 12, "temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0}
    with running(lambda: spile.load(golden / "mlx-2bit", on_note=lambda note: None)) as server:
        replies = [server.send("/v1/completions", {**body, "n": 2}).body["choices"] for _ in range(2)]
        assert [c["text"] for c in replies[0]] == [c["text"] for c in replies[1]]
        assert replies[0][0]["text"] != replies[0][1]["text"]
        alone = server.send("/v1/completions", {**body, "seed": 8}).body["choices"][0]["text"]
        assert alone == replies[0][1]["text"]


def test_logprobs_of_chat(says: Callable[..., Running]) -> None:
    server = says("Hé")
    answer = server.client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [token.token for token in content] == ["H", "�", "�"]
    assert b"".join(bytes(token.bytes) for token in content).decode() == "Hé"
    assert all(
        len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token for token in content
    )
    assert all(token.logprob == pytest.approx(0, abs=1e-6) for token in content)
    chunks = list(
        server.client.chat.completions.create(
            model="tiny", messages=USER, logprobs=True, top_logprobs=2, stream=True
        )
    )
    streamed = [
        one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
    ]
    assert [one.model_dump() for one in streamed] == [one.model_dump() for one in content]
    plain = server.send("/v1/chat/completions", {"messages": USER, "logprobs": True}).body
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert server.send("/v1/chat/completions", {"messages": USER}).body["choices"][0]["logprobs"] is None


def test_logprobs_of_completions(says: Callable[..., Running]) -> None:
    server = says("abc")
    answer = server.client.completions.create(model="tiny", prompt="x", logprobs=2)
    found = answer.choices[0].logprobs
    assert found.tokens == ["a", "b", "c"]
    assert found.text_offset == [0, 1, 2]
    assert [next(iter(top)) for top in found.top_logprobs] == ["a", "b", "c"]
    chunks = list(server.client.completions.create(model="tiny", prompt="x", logprobs=2, stream=True))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [one.tokens[0] for one in streamed] == ["a", "b", "c"]
    assert [one.text_offset[0] for one in streamed] == [0, 1, 2]


def test_bias_with_keys_of_text_works(scripted: Callable[..., Running]) -> None:
    server = scripted(SCRIPT)
    first = server.send("/tokenize", {"prompt": "!"}).body["tokens"][0]
    reply = server.send("/v1/completions", {"prompt": "x", "logit_bias": {str(first): 100}, "max_tokens": 1})
    assert reply.status == 200
    unknown = server.send("/v1/completions", {"prompt": "x", "logit_bias": {"99999": 1}})
    assert (unknown.status, unknown.body["error"]["param"]) == (400, "logit_bias")


def test_reasoning_is_apart_from_content(says: Callable[..., Running]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if 1 %}{% endif %}{# <think> #}"
    server = says("<think>\nhm\n</think>\n\nYes", template=template)
    reply = server.send("/v1/chat/completions", {"messages": USER}).body
    message = reply["choices"][0]["message"]
    assert message["content"] == "Yes"
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    details = reply["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("<think>\nhm\n</think>")}
    frames = server.frames("/v1/chat/completions", {"messages": USER})
    deltas = [frame["choices"][0]["delta"] for frame in frames[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"


def test_thinking_switch_reaches_the_template(says: Callable[..., Running]) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}{{ style }}"
    server = says(template=template)
    body = {"messages": USER, "enable_thinking": False, "chat_template_kwargs": {"style": "s"}}
    reply = server.send("/v1/chat/completions", body).body
    assert reply["usage"]["prompt_tokens"] == len("HiFalses")


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_parts_are_one_text(says: Callable[..., Running], role: str) -> None:
    server = says()
    counts = []
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    for content in ("AB", parts, ["A", "B"]):
        body = {"messages": [{"role": role, "content": content}, *USER]}
        counts.append(server.send("/v1/chat/completions", body).body["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1
    empty = {"messages": [{"role": role, "content": []}, *USER]}
    assert server.send("/v1/chat/completions", empty).status == 200


def test_image_is_refused_by_name(says: Callable[..., Running]) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://example.com/x.png"}}
    reply = says().send("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert (reply.status, reply.body["error"]["param"]) == (400, "messages[0].content[0]")
    assert "image_url" in reply.body["error"]["message"]


def test_history_of_a_tool_call_is_taken(says: Callable[..., Running]) -> None:
    server = says()
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    for content in ({"content": None}, {}):
        history = [
            *USER,
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "1", "content": "seen"},
        ]
        assert server.send("/v1/chat/completions", {"messages": history}).status == 200


def test_model_without_template_completes_and_says_why_it_does_not_chat(says: Callable[..., Running]) -> None:
    server = says(template=None)
    reply = server.send("/v1/chat/completions", {"messages": USER})
    assert (reply.status, reply.body["error"]["code"]) == (400, "no_chat_template")
    assert "/v1/completions" in reply.body["error"]["message"]
    assert "--chat-template" in reply.body["error"]["message"]
    assert server.send("/v1/completions", {"prompt": "Hi"}).body["choices"][0]["text"] == "Hello"


def test_template_that_refuses_is_heard(says: Callable[..., Running]) -> None:
    reply = says(template="{{ raise_exception('no system here') }}").send(
        "/v1/chat/completions", {"messages": USER}
    )
    assert reply.status == 400
    assert "no system here" in reply.body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context_is_refused_before_any_work(
    says: Callable[..., Running], stream: bool
) -> None:
    engine = FakeEngine([EOS], context=128)
    server = says(engine=engine)
    reply = server.send("/v1/completions", {"prompt": "x" * 200, "stream": stream})
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
    assert "200" in reply.body["error"]["message"]
    assert "128" in reply.body["error"]["message"]
    assert [call for call in engine.calls if call[0] == "prefill"] == []


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"messages": 1}',
        {"messages": USER, "temperature": -1},
        {"messages": USER, "n": 0},
        {},
    ],
)
def test_wrong_bodies_are_refused_and_the_next_is_answered(says: Callable[..., Running], body: Any) -> None:
    server = says()
    reply = server.send("/v1/chat/completions", body)
    assert reply.status == 400
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert reply.body["error"]["type"] == "invalid_request_error"
    assert server.send("/v1/chat/completions", {"messages": USER}).status == 200


def test_unknown_paths_and_methods_are_told_in_json(says: Callable[..., Running]) -> None:
    server = says()
    reply = server.send("/v1/embeddings", {"input": "x"})
    assert (reply.status, reply.body["error"]["code"]) == (404, "not_found")
    reply = server.send("/v1/chat/completions", method="GET")
    assert (reply.status, reply.body["error"]["code"]) == (405, "method_not_allowed")
    assert "POST" in reply.headers["allow"]


def test_tokenize_and_detokenize_are_inverse(says: Callable[..., Running]) -> None:
    server = says()
    tokens = server.send("/tokenize", {"prompt": "Hé"}).body
    assert (tokens["tokens"], tokens["count"]) == (list("Hé".encode()), 3)
    assert server.send("/detokenize", {"tokens": tokens["tokens"]}).body == {"prompt": "Hé"}
    plain = server.send("/tokenize", {"prompt": "Hé", "add_special_tokens": False}).body
    assert plain["tokens"] == tokens["tokens"]
    of_messages = server.send("/tokenize", {"messages": USER}).body
    assert bytes(of_messages["tokens"]) == b"<user>Hi>"
    assert server.send("/detokenize", {"tokens": [5000]}).status == 400


@pytest.mark.parametrize("adds_first", [True, False])
def test_text_far_beyond_the_context_is_not_even_encoded(
    says: Callable[..., Running], adds_first: bool
) -> None:
    body = {"prompt": "x" * 90_000, "add_special_tokens": adds_first}
    reply = says(context=100).send("/tokenize", body)
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")


def test_metrics_count_what_answers_say(says: Callable[..., Running]) -> None:
    server = says("Hello", server={"model_ids": ("counted",)})
    for _ in range(2):
        server.send("/v1/completions", {"prompt": "abc"})
    server.send("/v1/completions", {"prompt": ""})
    text = server.send("/metrics").body.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["spile_prompt_tokens_total"] == "6"
    assert lines["spile_completion_tokens_total"] == "10"
    assert lines['spile_requests_total{path="/v1/completions",status="200",outcome="stop"}'] == "2"
    assert lines['spile_requests_total{path="/v1/completions",status="400",outcome="invalid_value"}'] == "1"
    assert lines["spile_bytes_read_total"] == "1000"
    assert lines["spile_expert_misses_total"] == "10"
    assert lines["spile_time_to_first_token_seconds_count"] == "2"
    assert lines['spile_time_to_first_token_seconds_bucket{le="+Inf"}'] == "2"
    assert lines["spile_up"] == "1"


def test_status_and_health_say_how_things_are(says: Callable[..., Running]) -> None:
    server = says(server={"budget_bytes": 10**9})
    assert server.send("/health").body == {"status": "ok"}
    status = server.send("/status").body
    assert status["model"] == "tiny"
    assert status["budget_bytes"] == 10**9
    assert status["context"] == 4096
    assert status["sampling"]["temperature"] == 0
    assert status["requests"] == []


def test_log_sums_each_request_up(says: Callable[..., Running]) -> None:
    server = says("Hello")
    server.send("/v1/completions", {"prompt": "abc"})
    line = server.log.getvalue().splitlines()[-1]
    assert "Prompt: 3 tokens" in line
    assert "Generation: 5 tokens" in line
    assert "Peak memory: " in line
    assert "75.0 % hits" in line


def test_every_endpoint_is_described(says: Callable[..., Running]) -> None:
    document = says().send("/openapi.json").body
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/health"} <= set(
        document["paths"]
    )
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["model"]["enum"] == ["tiny", "folder", None]


def test_budget_of_a_running_server_is_changed_by_who_has_the_key() -> None:
    now = current_memory_bytes()  # of all that these tests have loaded
    load = partial(spile.load, memory=now + 900_000_000, flash_moe=True, on_note=lambda note: None)
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    key = {"x-api-key": "secret"}
    with running(load, model_ids=("demo",), api_keys=("secret",)) as server:

        def answer() -> Any:
            return server.send("/v1/completions", body, headers=key).body["choices"][0]["text"]

        before, least = answer(), f"{now // 1_000_000 + 250}MB"
        assert server.send("/memory", {"memory": least}).status == 401
        for memory in (least, now + 800_000_000):
            reply = server.send("/memory", {"memory": memory}, headers=key)
            assert reply.status == 200
            assert reply.body["summary"].startswith("memory ")
            assert server.send("/status", headers=key).body["budget_bytes"] == reply.body["budget_bytes"]
            assert answer() == before
        assert reply.body["budget_bytes"] == now + 800_000_000
        for memory, told in (("20MB", "and the budget is 20.0 MB"), ("soon", "is no size"), (0, "memory")):
            refused = server.send("/memory", {"memory": memory}, headers=key)
            assert refused.status == 400
            assert told in refused.body["error"]["message"]
        assert answer() == before


def test_budget_of_a_server_without_a_key_stays(says: Callable[..., Running]) -> None:
    reply = says("Hello").send("/memory", {"memory": "1GB"})
    assert reply.status == 403
    assert "--api-key" in reply.body["error"]["message"]
