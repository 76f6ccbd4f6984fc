"""SmolLM2 behind `foredraft serve`: a schema is followed, and drafting changes no structured answer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "rivers": {"type": "integer"}},
    "required": ["city", "rivers"],
    "additionalProperties": False,
}


@pytest.mark.real
def test_a_schema_is_followed_with_and_without_drafts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "foredraft", "serve", "--port", "0", "--dtype", "float32"]
    command += ["--kv-gb", "0.3"]
    body = {
        "messages": [{"role": "user", "content": "Describe Paris as JSON with city and rivers."}],
        "temperature": 0,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    }
    with log.open("w") as err, subprocess.Popen(command, stderr=err) as child:
        try:
            url = _address(child, log)
            post = f"{url}/v1/chat/completions"
            budgets = ({"foredraft": {"budget": budget}} for budget in (0, 6))
            answers = [httpx2.post(post, json=body | budget, timeout=60) for budget in budgets]
        finally:
            child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    plain, drafted = (answer.json()["choices"][0]["message"]["content"] for answer in answers)
    assert plain == drafted
    assert set(json.loads(plain)) == {"city", "rivers"}


def _address(child: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(900):
        assert child.poll() is None, log.read_text()
        said = log.read_text()
        if (found := re.search(r"http://127\.0\.0\.1:\d+", said)) and "startup complete" in said:
            return found[0]
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.1)
    raise AssertionError(log.read_text())
