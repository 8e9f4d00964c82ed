import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rdt_trainer.errors import ClientError, SettingsError
from rdt_trainer.http_client import HttpClient

ENGINE_ERROR = {
    "error": {"message": "worker 0: chunk 3 torn", "type": "InternalServerError", "code": 500}
}


class Server(ThreadingHTTPServer):
    """Answers with what was set for a route (status, body), and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, object, str | None]] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.may_answer = threading.Event()
        self.may_answer.set()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(
            (self.path, json.loads(body) if body else None, self.headers.get("Authorization"))
        )
        self.server.may_answer.wait(10)
        route = self.path.partition("?")[0]
        status, text = self.server.answers.get(route, (200, '{"message": "ok"}'))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.may_answer.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_call_has_the_route_and_body_of_vllm(server):
    with HttpClient(server.url + "/", api_key="secret") as client:
        client.init({"address": "h:1", "replica": 0})
        client.pause()
        client.start()
        client.update({"session": "ab", "epoch": 7})
        client.finish("7")
        client.finish()
        client.reset_prefix_cache()
        client.resume()
        client.shutdown()
    assert [(path, body) for path, body, _ in server.asked] == [
        ("/init_weight_transfer_engine", {"init_info": {"address": "h:1", "replica": 0}}),
        ("/pause?mode=abort", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"session": "ab", "epoch": 7}}),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/finish_weight_update", None),
        ("/reset_prefix_cache", None),
        ("/resume", None),
        ("/shutdown_weight_transfer_engine", None),
    ]
    assert {key for _, _, key in server.asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (json.dumps(ENGINE_ERROR), "worker 0: chunk 3 torn"),
        ('{"error": "Failed to pause generation: busy"}', "Failed to pause generation: busy"),
        ('{"detail": "Request body must be a JSON object"}', "Request body must be a JSON object"),
        ('{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        ("Internal Server Error", "Internal Server Error"),
        ("", "Internal Server Error"),
    ],
)
def test_errors_carry_the_servers_words(server, body, text):
    server.answers["/update_weights"] = (500, body)
    with HttpClient(server.url) as client, pytest.raises(ClientError) as caught:
        client.update({})
    assert caught.value.server_text == text
    assert caught.value.status == 500
    assert str(caught.value) == f"POST {server.url}/update_weights: HTTP 500: {text}"


def test_long_words_keep_their_beginning_and_their_end(server):
    text = "what went wrong" + 9000 * "." + "where"
    server.answers["/update_weights"] = (500, json.dumps({"error": text}))
    with HttpClient(server.url) as client, pytest.raises(ClientError) as caught:
        client.update({})
    said = caught.value.server_text
    assert said.startswith("what went wrong") and said.endswith("where")
    assert len(said) < 4100 and " [...] " in said


@pytest.mark.parametrize("is_paused", [True, False])
def test_whether_it_is_paused_is_asked(server, is_paused):
    server.answers["/is_paused"] = (200, json.dumps({"is_paused": is_paused}))
    with HttpClient(server.url) as client:
        assert client.is_paused() is is_paused


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, ""), "VLLM_SERVER_DEV_MODE"),
        ((200, "{}"), "expected is_paused"),
        ((200, "[]"), "expected is_paused"),
        ((200, '{"is_paused": null}'), "expected is_paused"),
        ((500, '{"error": "Failed to fetch"}'), "HTTP 500: Failed to fetch"),
    ],
)
def test_an_answer_that_does_not_tell_whether_it_is_paused_is_an_error(server, answer, said):
    server.answers["/is_paused"] = answer
    with HttpClient(server.url) as client, pytest.raises(ClientError, match=said):
        client.is_paused()


def test_missing_route_names_the_remedy(server):
    server.answers["/start_weight_update"] = (404, '{"error": {"message": "Not Found"}}')
    with HttpClient(server.url) as client, pytest.raises(ClientError, match="VLLM_SERVER_DEV_MODE"):
        client.start()


def test_cache_that_could_not_be_reset_is_an_error(server):
    server.answers["/reset_prefix_cache"] = (200, '{"success": false}')
    with HttpClient(server.url) as client, pytest.raises(ClientError, match="still holds"):
        client.reset_prefix_cache()


def test_a_client_that_is_closed_says_so():
    client = HttpClient("http://localhost")
    client.close()
    with pytest.raises(ClientError, match=r"/start_weight_update: this client is closed"):
        client.start()


def test_silence_of_the_server_has_a_deadline(server):
    server.may_answer.clear()
    with HttpClient(server.url, timeout_seconds=0.2) as client:
        message = r"/finish_weight_update: the server was silent for 0\.2 seconds.*raise timeout"
        with pytest.raises(ClientError, match=message):
            client.finish()


@pytest.mark.parametrize(
    ("url", "error"),
    [("http://127.0.0.1:9", "ConnectError"), ("127.0.0.1:9", "UnsupportedProtocol")],
)
def test_unreachable_server_is_named_with_the_remedy(url, error):
    with HttpClient(url, timeout_seconds=5, connect_timeout_seconds=3) as client:
        with pytest.raises(ClientError) as caught:
            client.start()
    message = str(caught.value)
    assert message.startswith(f"POST {url}/start_weight_update: no connection ({error}: ")
    assert message.endswith(
        "check that the server is up and that this is its scheme, host and port"
    )


def test_no_call_depends_on_what_a_server_does_with_an_idle_connection(server, monkeypatch):
    """A second call over one may meet its end, which the server chose before it heard of it."""
    answer = Handler.do_POST

    def answer_once(handler):
        if getattr(handler, "has_answered", False):
            handler.close_connection = True
            return
        handler.has_answered = True
        answer(handler)

    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    monkeypatch.setattr(Handler, "do_POST", answer_once)
    server.answers = {f"/{call}": (204, "") for call in ("pause", "resume")}
    with HttpClient(server.url) as client:
        client.pause()
        client.resume()
    assert [path for path, _, _ in server.asked] == ["/pause?mode=abort", "/resume"]


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "no:proxy"])
def test_the_server_is_asked_directly_whatever_proxy_the_environment_names(
    server, monkeypatch, proxy
):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    with HttpClient(server.url) as client:
        client.init({"token": "the job's"})
    assert [path for path, _, _ in server.asked] == ["/init_weight_transfer_engine"]


@pytest.mark.parametrize("url", ["http://host:port", "http://[::1", "http://h:1:2"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(SettingsError, match="expected http://host:port"):
        HttpClient(url)


def test_a_key_that_is_not_ascii_is_the_servers_to_judge(server):
    with HttpClient(server.url, api_key="schlüssel") as client:
        client.start()
    assert server.asked[0][2] == "Bearer schlüssel".encode().decode("latin-1")


def test_server_that_dies_during_a_call_is_an_error_not_a_wait(server):
    def hang_up(handler: Handler) -> None:
        handler.connection.close()

    original, Handler.do_POST = Handler.do_POST, hang_up
    try:
        with HttpClient(server.url, timeout_seconds=30) as client:
            with pytest.raises(
                ClientError, match=r"connection broke: (Read|RemoteProtocol)Error.*log"
            ):
                client.finish()
    finally:
        Handler.do_POST = original
