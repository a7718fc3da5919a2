"""The monolithic backend: one thread, one request at a time, and who leaves or closes ends the work."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from mooncake_jax.frontend.monolith import MonolithBackend


class CountingEngine:
    """Answers n+1, n+2, … to [.., n]; hangs while `held`, until cancelled."""

    max_tokens = 120

    def __init__(self):
        self.held = threading.Event()
        self.threads, self.num_running, self.most_running = set(), 0, 0

    def generate(self, request, on_token=None, cancelled=None, on_prompt=None):
        self.threads.add(threading.current_thread())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for i in range(request.max_tokens):
                while self.held.is_set():
                    if cancelled():
                        return SimpleNamespace(finish=None)
                    time.sleep(0.001)
                on_token(request.tokens[-1] + 1 + i, -0.5, [])
            return SimpleNamespace(finish="length")
        finally:
            self.num_running -= 1


class Backend(MonolithBackend):
    """Counts what the `serve` fixture looks at."""

    num_open = 0


def wait_for(condition, what):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_not_ready_until_built_and_then_one_at_a_time(serve):
    engine, built = CountingEngine(), threading.Event()

    def build():
        engine.threads.add(threading.current_thread())
        assert built.wait(10)
        return engine

    with serve(Backend(build)) as client:
        assert client.get("/ready")[0] == 503
        assert client.post("/v1/completions", {"prompt": "hi"})[0] == 503
        built.set()
        wait_for(lambda: client.get("/ready")[0] == 200, "ready")
        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(lambda p: client.complete(p, max_tokens=3)["choices"][0]["text"], "aeim")
            assert list(texts) == ["bcd", "fgh", "jkl", "nop"]
        assert client.complete("a", max_tokens=9, stop="ef")["choices"][0]["text"] == "bcd"
    assert engine.most_running == 1
    assert len(engine.threads) == 1


def test_closing_ends_the_running_request(serve, monkeypatch):
    monkeypatch.setattr("mooncake_jax.frontend.server.GRACE_SECONDS", 0.05)
    engine = CountingEngine()
    engine.held.set()
    with serve(Backend(lambda: engine)) as client, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: client.get("/ready")[0] == 200, "ready")
        asked = pool.submit(client.post, "/v1/completions", {"prompt": "hi"})
        wait_for(lambda: engine.num_running == 1, "running")
        client.server.close()
        assert engine.num_running == 0
        assert asked.exception(10) is not None, "there was no answer"


def test_a_build_that_fails_is_never_ready(serve, caplog):
    def build():
        raise ValueError("no such weights")

    with serve(Backend(build)) as client:
        wait_for(lambda: "no such weights" in caplog.text, "logged")
        assert client.get("/ready")[0] == 503
        assert client.get("/health")[0] == 200
