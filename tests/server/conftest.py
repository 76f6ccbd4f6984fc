"""A real server on a free port of 127.0.0.1, around a tiny random model in float32."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

import tiny_models
from foredraft import LLM
from foredraft.server.app import create_app, make_server, make_service
from foredraft.server.config import ServeConfig
from foredraft.server.service import Service
from tiny_tokenizers import TEMPLATE, byte_level

MESSAGES = [{"role": "user", "content": "the cat sat on the mat, the cat"}]


@dataclass
class Running:
    """A server that runs, and clients for it."""

    url: str
    service: Service
    http: httpx2.Client
    openai: OpenAI

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, **body: Any) -> httpx2.Response:
        return self.post(
            "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **body}
        )

    def idle(self, seconds: float = 5.0) -> bool:
        """True once the engine holds nothing."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.service.worker._engine.has_work and not self.service._places:
                return True
            time.sleep(0.01)
        return False


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return tiny_models.build(
        "llama", path, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, max_position_embeddings=2048
    )


@contextmanager
def running(llm: LLM, **options: Any) -> Iterator[Running]:
    config = ServeConfig(**{"model_name": "tiny", "max_seqs": llm.engine.config.max_seqs, **options})
    service = make_service(llm, config)
    server = make_server(create_app(service, draft="ngram"), service)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        key = config.api_keys[0] if config.api_keys else "none"
        with (
            httpx2.Client(base_url=url, timeout=30) as http,
            OpenAI(base_url=f"{url}/v1", api_key=key) as client,
        ):
            yield Running(url, service, http, client)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., Any]]:
    """Start further servers: serve(max_queue=0) is a context manager."""

    def start(*, max_seqs: int = 2, draft: str | None = "ngram", **options: Any) -> Any:
        return running(LLM(model, draft, max_seqs=max_seqs, kv_gb=0.02), **options)

    return start


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Running]:
    with running(LLM(model, "ngram", max_seqs=4, kv_gb=0.05, budget=5), max_queue=16) as started:
        yield started


@pytest.fixture(autouse=True)
def no_slot_is_leaked(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        assert request.getfixturevalue("server").idle()
