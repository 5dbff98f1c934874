"""Who may talk to the model, and who may not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from serving import fake_model, running
from spile.cli import run
from spile.errors import OptionError
from spile.server.intake import Limits
from spile.server.names import checked_host, checked_keys, checked_origin, is_loopback

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


def test_hosts_that_were_allowed_may_be_named(tmp_path: Path) -> None:
    allowed = ("ai.example.org", "host.docker.internal", "fd00::1")
    with running(lambda: fake_model(tmp_path), hosts=allowed) as server:
        for host, status in (
            ("ai.example.org", 200),
            ("AI.Example.org:8443", 200),
            ("host.docker.internal:8080", 200),
            ("[fd00::1]:8080", 200),
            ("127.0.0.1", 200),
            ("example.org", 403),
            ("evil.ai.example.org", 403),
            ("ai.example.org.evil.example", 403),
        ):
            reply = server.send("/health", headers={"host": host})
            assert reply.status == status, host
            assert status == 200 or "--allowed-host" in reply.body["error"]["message"]
        # A page that the proxy serves talks to where it comes from.
        own = {"host": "ai.example.org", "origin": "https://ai.example.org"}
        assert server.send(CHAT, {"messages": USER}, headers=own).status == 200
    with running(lambda: fake_model(tmp_path), hosts=allowed, is_loopback=False) as server:
        assert server.send("/health", headers={"host": "other.example"}).status == 403
    with running(lambda: fake_model(tmp_path), is_loopback=False) as server:
        assert server.send("/health", headers={"host": "any.example"}).status == 200


def test_any_key_opens_by_either_header(tmp_path: Path) -> None:
    with running(lambda: fake_model(tmp_path), api_keys=("one", "two")) as server:
        for headers, status in (
            ({"authorization": "Bearer one"}, 200),
            ({"authorization": "bearer two"}, 200),
            ({"x-api-key": "two"}, 200),
            ({"x-api-key": "two", "authorization": "Bearer none"}, 200),
            ({"x-api-key": "three"}, 401),
            ({"x-api-key": ""}, 401),
            ({"authorization": "Bearer "}, 401),
            ({"authorization": "Bearer onetwo"}, 401),
            ({"authorization": "Basic one"}, 401),
        ):
            assert server.send("/v1/models", headers=headers).status == status, headers


def test_pages_that_were_named_may_send_what_openais_client_sends(tmp_path: Path) -> None:
    origin = "https://chat.example"
    sent = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,x-api-key"
    asked = {"origin": origin, "access-control-request-method": "POST"}
    asked |= {"access-control-request-headers": sent, "access-control-request-private-network": "true"}
    with running(lambda: fake_model(tmp_path), origins=(origin,), api_keys=("secret",)) as server:
        for path in (CHAT, "/chat/completions", "/v1/models", "/nowhere"):
            reply = server.send(path, method="OPTIONS", headers=asked)
            assert reply.status == 200
            assert reply.headers["access-control-allow-origin"] == origin
            assert reply.headers["access-control-allow-headers"] == sent
            assert reply.headers["access-control-allow-private-network"] == "true"
            assert "POST" in reply.headers["access-control-allow-methods"]
            assert "origin" in reply.headers["vary"].lower()
        strange = {**asked, "access-control-request-headers": "x\x01y"}
        assert (
            "access-control-allow-headers" not in server.send(CHAT, method="OPTIONS", headers=strange).headers
        )
        refused = server.send(CHAT, method="OPTIONS", headers={**asked, "origin": "https://x.example"})
        assert refused.status == 403
        assert "--cors-origin" in refused.body["error"]["message"]
        assert "access-control-allow-origin" not in refused.headers
        assert server.send(CHAT, method="OPTIONS", headers={"origin": origin}).status == 401


def test_errors_of_every_kind_can_be_read_by_pages_that_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = "https://chat.example"
    headers = {"origin": origin}
    with running(
        lambda: fake_model(tmp_path), origins=(origin,), limits=replace(Limits.of(None), body_nbytes=1000)
    ) as server:
        replies = [
            server.send(CHAT, b"{", headers=headers),
            server.send("/nowhere", headers=headers),
            server.send(CHAT, method="DELETE", headers=headers),
            server.send(CHAT, {"messages": USER, "user": "x" * 2000}, headers=headers),
            server.send("/health", headers={**headers, "host": "evil.example"}),
        ]
        monkeypatch.setattr(server.worker, "status", None)
        replies.append(server.send("/status", headers=headers))
    assert [reply.status for reply in replies] == [400, 404, 405, 413, 403, 500]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        assert "retry-after" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("localhost", "http://localhost"),
        ("localhost:3000", "http://localhost:3000"),
        ("app.example", "https://app.example"),
        ("https://app.example/", "https://app.example"),
        ("https://app.example/chat?x#y", "https://app.example"),
        ("https://App.Example", "https://app.example"),
        ("HTTPS://app.example", "https://app.example"),
        ("https://me:secret@app.example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80", "http://app.example"),
        ("http://bücher.example", "http://xn--bcher-kva.example"),
        ("http://[0:0:0:0:0:0:0:1]:3000", "http://[::1]:3000"),
        (" https://app.example", "https://app.example"),
        ("https://*.example", None),
        ("https://", None),
        ("", None),
        ("https://app.example:x", None),
        ("https://app.example:99999", None),
        ("http://[::1", None),
    ],
)
def test_origin_that_no_browser_sends_is_refused_with_the_right_form(given: str, right: str | None) -> None:
    with pytest.raises(OptionError, match="--cors-origin is") as caught:
        checked_origin(given)
    if right is not None:
        assert caught.value.hint == f"Give {right}."
        assert checked_origin(right) == right


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "http://localhost:3000", "https://app.example", "app://obsidian.md", "http://[::1]:3000",
     "chrome-extension://abcdefghijklmnop", "https://xn--bcher-kva.example:8443"],
)  # fmt: skip
def test_origins_that_browsers_send_are_taken(origin: str) -> None:
    assert checked_origin(origin) == origin


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("ai.example.org", "ai.example.org"),
        ("AI.Example.Org.", "ai.example.org"),
        ("host.docker.internal", "host.docker.internal"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("[FD00::0001]", "fd00::1"),
        ("fd00::1", "fd00::1"),
        ("192.168.1.5", "192.168.1.5"),
    ],
)
def test_allowed_hosts_are_compared_as_requests_name_them(given: str, wanted: str) -> None:
    assert checked_host(given) == wanted


@pytest.mark.parametrize(
    "given",
    ["", " ", "https://ai.example.org", "ai.example.org:8443", "ai.example.org/x", "*", "*.example.org", ".example.org",
     "a b", "me@ai.example.org", "[::1", "ai.example.org\n"],
)  # fmt: skip
def test_host_that_no_request_names_is_refused(given: str) -> None:
    with pytest.raises(OptionError, match="--allowed-host is") as caught:
        checked_host(given)
    if "ai.example.org" in given:
        assert caught.value.hint == "Give ai.example.org."


def test_keys_come_from_flags_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nfirst\r\n  second  \n#third\nfirst\n")
    assert checked_keys(["zero"], file) == ("zero", "first", "second")
    for text, message in (("# none\n", "has no key"), ("a b\n", "line 1 of"), ("ok\nsöcret\n", "line 2 of")):
        file.write_text(text)
        with pytest.raises(OptionError, match=message) as caught:
            checked_keys([], file)
        assert "söcret" not in str(caught.value)
    for path, message in ((tmp_path, "regular"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(OptionError, match=message):
            checked_keys([], path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="is not text"):
        checked_keys([], file)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cors-origin", "localhost"], "Give http://localhost."),
        (["--allowed-host", "https://ai.example.org"], "Give ai.example.org."),
        (["--api-key", "a b"], "cannot send it"),
        (["--api-key", "söcret"], "cannot send it"),
        (["--api-key", "good", "--api-key", " "], "--api-key is empty"),
        (["--api-key-file", "/no/such/file"], "cannot be read"),
        (["--alias", "good", "--alias", ""], "--model-id is empty"),
        (["--model-id", " spaced"], "no space at either end"),
        (["--model-id", "a\tb"], "can be printed"),
        (["--host", ""], "--host is empty"),
        (["--host", "127.0.0.1:9000"], "Give --host 127.0.0.1, and --port apart."),
        (["--host", "http://127.0.0.1"], "Give --host 127.0.0.1, and --port apart."),
    ],
)
def test_names_that_can_never_match_are_refused_at_the_start(
    flags: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "/no/such/model", *flags]) == 2
    err = " ".join(capfd.readouterr().err.split())
    assert words in err
    assert "there is no model" not in err


def test_key_of_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPILE_API_KEY", "secret")
    assert run(["serve", "/no/such/model", "--host", "0.0.0.0", "--port", "0"]) == 1
    assert "it has no key" not in capfd.readouterr().err
