"""Who may talk to the model, and who may not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from serving import fake_model, running
from spile.cli import run
from spile.server.names import is_loopback

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def test_key_is_asked_for_everywhere_but_where_there_is_nothing_to_know(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), api_keys=("söcret",)) as server:
        for path, body in (
            (CHAT, {"messages": USER}),
            ("/metrics", None),
            ("/status", None),
            ("/v1/models", None),
        ):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}):
                reply = server.send(path, body, headers=headers)
                assert (reply.status, reply.body["error"]["code"]) == (401, "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
        assert server.send("/health").status == 200
        right = {"authorization": "Bearer söcret".encode().decode("latin-1")}
        assert server.send("/metrics", headers=right).status == 200


def test_openai_client_sends_its_key(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), api_keys=("secret",)) as server:
        answer = server.client.chat.completions.create(model="tiny", messages=USER)
        assert answer.choices[0].message.content == "Hello"
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_names_that_only_point_at_this_machine_are_refused(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        for host in (
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "[",
            "[x]",
            "x@localhost",
        ):
            assert server.send("/health", headers={"host": host}).status == 403
        for host in ("localhost", "LOCALHOST:9", "127.0.0.1:1", "127.8.8.8", "[::1]:8080"):
            assert server.send("/health", headers={"host": host}).status == 200


def test_pages_from_elsewhere_are_refused(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path)) as server:
        own = server.url
        for origin, status in ((own, 200), ("http://evil.example", 403), ("null", 403), ("http://[", 403)):
            reply = server.send(CHAT, {"messages": USER}, headers={"origin": origin})
            assert reply.status == status
            assert "access-control-allow-origin" not in reply.headers


def test_pages_that_were_named_are_welcome(tmp_path: Path) -> None:
    origin = "https://chat.example"
    with running(lambda: fake_model(tmp_path), origins=(origin,), api_keys=("secret",)) as server:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization,content-type"
        preflight = server.send(CHAT, method="OPTIONS", headers=asked)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        reply = server.send(
            CHAT, {"messages": USER}, headers={"origin": origin, "authorization": "Bearer secret"}
        )
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)
        refused = server.send(CHAT, {"messages": USER}, headers={"origin": origin})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, origin)
        assert server.send(CHAT, {"messages": USER}, headers={"origin": "https://x.example"}).status == 403


@pytest.mark.parametrize(
    ("host", "wanted"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_loopback_is_told_from_the_rest(host: str, wanted: bool) -> None:
    assert is_loopback(host) is wanted


def test_loopback_address_in_brackets_needs_no_key(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "/no/such/model", "--host", "[::1]", "--port", "0"]) == 1
    assert "it has no key" not in capfd.readouterr().err


def test_other_addresses_need_a_key(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "it has no key" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--port", "70000"], ["--parallel", "0"], ["--max-queue", "-1"], ["--temp", "-1"], ["--api-key", ""]],
)
def test_flags_out_of_range_are_refused_before_anything(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "/no/such/model", *flags]) == 2
    assert "no model" not in capfd.readouterr().err


def test_command_line_imports_no_server() -> None:
    code = (
        "import sys, spile.cli, spile.model; "
        "print([m for m in sys.modules if m.split('.')[0] in ('starlette', 'uvicorn', 'msgspec', 'h11')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
