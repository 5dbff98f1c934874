"""The chat page in a real browser: type, stream, stop, reload; and what a hostile model writes stays text.

Needs playwright and a Chromium (`SPILE_CHROMIUM` names one); nothing is downloaded. The server here is a fake that
says what it is told to, so that each test knows every byte; one test asks the real one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spile.server.page import load_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">
<b>bold?</b> &lt;i&gt; [a](javascript:window.hacked=3) [b](data:text/html,x) [c](https://example.org/?a=1&b="x")

```html
<script>window.hacked = 4</script>
</code></pre><img src=x onerror=window.hacked=5>
```
- item <iframe src="javascript:window.hacked=6"></iframe>

| a | <svg onload=window.hacked=7> |
|---|---|
| `<u>` | **x** |
"""


class Fake:
    """A server with one script: pieces of an answer, each a delta's text, ("think", text) or seconds to wait."""

    def __init__(self) -> None:
        self.script: list[Any] = ["Hello."]
        self.requests: list[dict[str, Any]] = []
        self.key: str | None = None
        self.failure: tuple[int, str] | None = None
        self.was_left = threading.Event()
        page = load_page()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                pass

            def reply(self, value: Any, status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def refuses(self) -> bool:
                if fake.key is None or self.headers["authorization"] == f"Bearer {fake.key}":
                    return False
                error = {"message": "the API key is missing or wrong", "code": "invalid_api_key"}
                self.reply({"error": error}, 401)
                return True

            def do_GET(self) -> None:
                if self.path == "/":
                    self.send_response(200)
                    for name, value in page.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(page.body)
                elif self.path == "/status" and not self.refuses():
                    self.reply(STATUS)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.refuses():
                    return
                fake.requests.append(body)
                if fake.failure is not None:
                    self.reply({"error": {"message": fake.failure[1]}}, fake.failure[0])
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                try:
                    for event in events(fake.script):
                        self.wfile.write(event)
                        self.wfile.flush()
                except OSError:
                    fake.was_left.set()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


STATUS = {
    "status": "ok",
    "model": "maple-2bit-mlx",
    "exact": True,
    "running": 0,
    "waiting": 0,
    "memory_bytes": 561_000_000,
    "budget_bytes": 630_000_000,
    "hit_rate": 0.43,
    "tokens_per_second": 10.4,
    "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": None},
    "requests": [],
}
USAGE = {
    "completion_tokens": 132,
    "spile": {
        "tokens_per_second": 10.41,
        "time_to_first_token_seconds": 1.24,
        "hit_rate": 0.43,
        "bytes_read": 1_240_000_000,
        "exact": True,
    },
}


def events(script: list[Any]) -> Iterator[bytes]:
    def event(value: Any) -> bytes:
        return f"data: {json.dumps(value)}\n\n".encode()

    yield b": a comment\n\n"
    yield event({"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    end = "stop"
    for piece in script:
        if isinstance(piece, (int, float)):
            time.sleep(piece)
        elif isinstance(piece, str):
            yield event({"id": "x", "choices": [{"index": 0, "delta": {"content": piece}}]})
        elif piece[0] == "think":
            yield event({"id": "x", "choices": [{"index": 0, "delta": {"reasoning_content": piece[1]}}]})
        elif piece[0] == "error":
            yield event({"error": {"message": piece[1]}})
            return
        else:
            end = piece[1]
    yield event({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": end}]})
    yield event({"id": "x", "choices": [], "usage": USAGE})
    yield b"data: [DONE]\n\n"


def test_page_is_small_and_asks_for_nothing_from_elsewhere() -> None:
    body = load_page().body
    assert len(body) < 40_000
    text = body.decode().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"(src|href)=[\"']?(https?:)?//|@import|url\(|innerHTML|outerHTML|insertAdjacent|eval\(", text
    )
    assert not re.search(r"<[^>]+ (style|on\w+)=", text.split("<script>")[0])


def test_policy_allows_the_one_script_and_the_one_style_by_their_digests() -> None:
    page = load_page()
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("SPILE_CHROMIUM") or CHROMIUM
    if path is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.close()


@pytest.fixture
def open_page(browser: Any, fake: Fake) -> Iterator[Callable[..., Any]]:
    """A function that opens the page in a fresh profile; what the console says is an error of the page's."""
    contexts, complaints = [], []

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def start(**options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", note)
        page.goto(fake.address)
        return page

    yield start
    for context in contexts:
        context.close()
    assert complaints == []


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def wait_for_end(page: Any) -> None:
    page.wait_for_selector("#log:not([aria-busy]) .assistant")


@pytest.mark.browser
def test_a_question_is_streamed_and_survives_a_reload(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    fake.script = ["The **sap** ", 0.3, "runs\n\n", "- in spring\n- and `so on`"]
    ask(page, "Why?\nSay <b>.")
    page.wait_for_selector(".assistant strong")  # while the rest is still to come
    assert page.locator("#send").get_attribute("aria-label") == "Stop"
    wait_for_end(page)
    assert page.locator(".assistant li").all_inner_texts() == ["in spring", "and so on"]
    assert page.locator(".user .body").inner_text() == "Why?\nSay <b>."
    assert "10.4 tok/s" in page.locator(".assistant .meta").inner_text()
    assert page.locator("#memory").inner_text() == "561 MB of 630 MB"
    assert page.locator("#hits").inner_text() == "43%"
    page.reload()
    assert "The sap runs" in page.locator(".assistant .body").inner_text()
    assert "Why?" in page.title()
    ask(page, "And then?")
    wait_for_end(page)
    sent = fake.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == "The **sap** runs\n\n- in spring\n- and `so on`"
    assert set(fake.requests[-1]) == {"messages", "stream", "stream_options"}


@pytest.mark.browser
def test_escape_stops_and_keeps_what_came(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    fake.script = ["One. ", *[part for _ in range(100) for part in ("more ", 0.05)]]
    ask(page, "Go on")
    page.locator(".assistant .body", has_text="more").wait_for()
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert "stopped" in page.locator(".assistant .meta").inner_text()
    assert page.locator(".assistant .body").inner_text().startswith("One. more")
    assert fake.was_left.wait(3)
    fake.script = ["Well."]
    page.get_by_label("Answer again").click()
    page.wait_for_selector("text=Well.")
    assert page.locator(".assistant").count() == 1


@pytest.mark.browser
def test_a_reload_in_the_middle_keeps_the_part_that_came(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    fake.script = ["Part one. ", 5, "Part two."]
    ask(page, "Go on")
    page.wait_for_selector("text=Part one.")
    page.reload()
    assert page.locator(".assistant .body").inner_text() == "Part one."
    assert fake.was_left.wait(7)


@pytest.mark.browser
@pytest.mark.parametrize("is_cut", [False, True])
def test_hostile_output_stays_text(open_page: Callable[..., Any], fake: Fake, is_cut: bool) -> None:
    page = open_page()
    fake.script = list(HOSTILE) if is_cut else [HOSTILE]
    ask(page, "<img src=x onerror=window.hacked=8>")
    wait_for_end(page)
    page.reload()
    page.wait_for_selector(".assistant .code")
    body = page.locator("#log")
    assert page.evaluate("window.hacked") is None
    assert body.locator("script, img, iframe, b, i, u, svg[onload], [onerror]").count() == 0
    assert [a.get_attribute("href") for a in body.locator("a").all()] == [
        "https://example.org/?a=1&b=%22x%22"
    ]
    assert body.locator("a").get_attribute("rel") == "noopener noreferrer"
    text = page.locator(".assistant .body").inner_text()
    for part in (
        "<script>window.hacked = 1</script>",
        "[a](javascript:window.hacked=3)",
        "onerror=window.hacked=5",
    ):
        assert part in text
    assert "<img src=x" in page.locator("#chats").inner_text()


@pytest.mark.browser
def test_markdown_becomes_elements(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    fake.script = [
        "# Head *one*\nA **b** _c_ 2*3*4 a_b_c\nnext https://example.org/a_(b).\n\n1. x\n   - y\n   - z\n2. w\n\n",
        "> quote\n\n---\n```python\ndef f(x):\n\n    return `x`\n```\nafter\n\n",
        "| a | b |\n|---|:-:|\n| 1 | 2 |\n```\nopen",
    ]
    ask(page, "x")
    wait_for_end(page)
    body = page.locator(".assistant .body")
    assert body.locator("h3 em").inner_text() == "one"
    assert body.locator("ol > li").count() == 2
    assert body.locator("ol > li > ul > li").all_inner_texts() == ["y", "z"]
    assert body.locator("blockquote").inner_text() == "quote"
    assert body.locator("hr").count() == 1
    assert body.locator("pre").all_inner_texts() == ["def f(x):\n\n    return `x`", "open"]
    assert body.locator(".bar span").first.inner_text() == "python"
    assert body.locator("td").all_inner_texts() == ["1", "2"]
    assert "a_b_c" in body.inner_text()
    assert body.locator("a").get_attribute("href") == "https://example.org/a_(b)"


@pytest.mark.browser
def test_code_can_be_copied(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    fake.script = ["```sh\necho <1>\n```"]
    ask(page, "x")
    wait_for_end(page)
    page.locator(".bar button").click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "echo <1>"


@pytest.mark.browser
def test_reasoning_is_folded_and_apart(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    fake.script = [("think", "Hm, <b>"), 0.3, ("think", " so."), "It is so."]
    ask(page, "x")
    page.wait_for_selector("text=Thinking")
    wait_for_end(page)
    details = page.locator("details")
    assert details.get_attribute("open") is None
    assert re.match(r"Thought for \d+ ms", details.locator("summary").inner_text())
    details.locator("summary").click()
    assert details.locator("div").inner_text() == "Hm, <b> so."
    assert page.locator(".assistant .body").inner_text() == "It is so."
    ask(page, "y")
    wait_for_end(page)
    assert fake.requests[-1]["messages"][1] == {"role": "assistant", "content": "It is so."}


@pytest.mark.browser
def test_settings_go_with_requests_and_survive_a_reload(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    page.click("#settings-open")
    assert page.locator("[name=top_k]").get_attribute("placeholder") == "40"
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0")
    page.fill("[name=seed]", "7")
    page.select_option("[name=think]", "off")
    page.keyboard.press("Escape")
    page.reload()
    ask(page, "x")
    wait_for_end(page)
    sent = fake.requests[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["seed"], sent["enable_thinking"]) == (0, 7, False)
    assert "top_p" not in sent


@pytest.mark.browser
def test_a_key_is_asked_for_sent_and_not_kept_with_the_conversations(
    open_page: Callable[..., Any], fake: Fake
) -> None:
    fake.key = "s3cret"
    page = open_page()
    page.wait_for_selector("dialog[open]")
    page.fill("[name=key]", "s3cret")
    page.click("text=Done")
    ask(page, "x")
    page.wait_for_selector("text=Hello.")
    assert "s3cret" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    ask(page, "y")
    wait_for_end(page)
    assert len(fake.requests) == 2


@pytest.mark.browser
@pytest.mark.parametrize(
    ("failure", "script", "shown"),
    [
        ((429, "the queue is full"), [], "The queue is full."),
        (None, ["Half", ("error", "the disk failed")], "the disk failed"),
        (None, [("think", "Hm"), ("end", "length")], "still reasoning"),
    ],
)
def test_failures_are_told_and_can_be_tried_again(
    open_page: Callable[..., Any], fake: Fake, failure: Any, script: list[Any], shown: str
) -> None:
    page = open_page()
    fake.failure, fake.script = failure, script
    ask(page, "x")
    page.wait_for_selector(f".fail:has-text('{shown}')")
    fake.failure, fake.script = None, ["Fine."]
    page.click("text=Try again")
    page.wait_for_selector("text=Fine.")
    assert page.locator(".fail").count() == 0


@pytest.mark.browser
def test_conversations_are_listed_chosen_edited_exported_and_deleted(
    open_page: Callable[..., Any], fake: Fake
) -> None:
    page = open_page()
    for text in ("First", "Second"):
        page.click("#new")
        ask(page, text)
        wait_for_end(page)
    assert page.locator("#chats .open").all_inner_texts() == ["Second", "First"]
    page.click("#chats >> text=First")
    assert page.locator(".user .body").inner_text() == "First"
    with page.expect_download() as download:
        page.click("#export")
    assert json.loads(download.value.path().read_text())["messages"][0]["content"] == "First"
    page.hover(".user")
    page.get_by_label("Edit and ask again").click()
    assert page.input_value("#input") == "First"
    ask(page, "Third")
    wait_for_end(page)
    assert page.locator(".user .body").all_inner_texts() == ["Third"]
    page.hover("#chats li >> nth=1")
    page.get_by_label("Delete Second").click()
    assert page.locator("#chats .open").count() == 1


@pytest.mark.browser
def test_keyboard_reaches_everything_and_shift_enter_makes_a_line(
    open_page: Callable[..., Any], fake: Fake
) -> None:
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "input"
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert fake.requests[0]["messages"][0]["content"] == "a\nb"
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')")
        )
    assert {"theme", "new", "settings-open", "export", "input", "Copy", "Answer again"} <= reached
    unnamed = (
        "[...document.querySelectorAll('button')].filter(b => !b.innerText.trim() && !b.ariaLabel).length"
    )
    assert page.evaluate(unnamed) == 0


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_until_it_is_chosen(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.click("#theme")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") != scheme


@pytest.mark.browser
def test_a_phone_has_no_sideways_scroll_and_a_drawer(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page(viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    fake.script = [
        "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n| " + "z | " * 40 + "\n|" + "-|" * 40 + "\n"
    ]
    ask(page, "w" * 200)
    wait_for_end(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.querySelector('#scroll').scrollWidth <= 360")
    assert not page.locator("#new").is_visible()
    page.click("#menu")
    page.wait_for_selector("#new", state="visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#new", state="hidden")


@pytest.mark.browser
def test_a_long_answer_is_followed_unless_one_scrolls_up(open_page: Callable[..., Any], fake: Fake) -> None:
    page = open_page()
    fake.script = [part for i in range(80) for part in (f"Line {i}\n\n", 0.02)]
    ask(page, "x")
    page.wait_for_selector("text=Line 30")
    at_end = "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 80)(document.querySelector('#scroll'))"
    assert page.evaluate(at_end)
    page.mouse.move(600, 300)
    page.mouse.wheel(0, -600)
    page.wait_for_selector("#down", state="visible")
    wait_for_end(page)
    assert not page.evaluate(at_end)
    page.click("#down")
    assert page.evaluate(at_end)


@pytest.mark.browser
def test_the_real_server_answers_the_page(browser: Any) -> None:
    command = [sys.executable, "-m", "spile", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(line for line in server.stderr if "ready" in line).split()[-1]
            page = browser.new_page()
            page.goto(address)
            ask(page, "A cat named Tom")
            page.wait_for_selector("#log:not([aria-busy]) .assistant", timeout=60_000)
            assert "tok/s" in page.locator(".assistant .meta").inner_text()
            page.close()
        finally:
            server.terminate()
            server.wait(30)
            server.stderr.close()  # type: ignore[union-attr]
