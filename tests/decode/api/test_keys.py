from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path
from typing import Any

import httpx
import pytest

from muser_decode.api.keys import ApiKeys
from muser_decode.api.openapi import OPERATIONS
from muser_decode.app import create_app
from muser_decode.entrance import Entrance
from muser_wire.private_files import KeyFileError

KEYS = ("first-key-0123456789ab", "second-key-0123456789ab")


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys", f"# for the editor\n{KEYS[0]}\n\n  {KEYS[1]}  \n")


def ask(kit: Any, keys: ApiKeys, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    entrance = Entrance(keys, None, frozenset({"127.0.0.1"}))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(kit.backend, entrance=entrance))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_each_key_of_the_file_is_one_and_nothing_else_is(key_file: Path) -> None:
    keys = ApiKeys(key_file)
    assert all(keys.admit(key) for key in KEYS)
    for other in ("", "#", "# for the editor", KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper(), "\ud800", "ключ"):
        assert not keys.admit(other)


def test_every_key_is_compared_whole_and_in_constant_time(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(key_file)
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def note(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", note)
    assert keys.admit(KEYS[0])
    # The first one is right, and the second is looked at all the same; both as digests of one length.
    assert [own for _, own in compared] == [hashlib.sha256(key.encode()).digest() for key in KEYS]
    assert {given for given, _ in compared} == {hashlib.sha256(KEYS[0].encode()).digest()}


def test_a_world_readable_key_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", KEYS[0], 0o644)
    with pytest.raises(KeyFileError, match=r"keys has mode 0644; others can read it: chmod 600"):
        ApiKeys(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no key; make one with"),
        ("# nothing\n\n", "has no key"),
        (f"{KEYS[0]}\nshort\n", "keys:2: a key has 20 to 256 visible ASCII characters"),
        ("two words are not a key here\n", "keys:1: a key has"),
        ("sch\u00fcssel-sch\u00fcssel-sch\u00fcssel\n", "keys:1: a key has"),
        ("x" * 257, "keys:1: a key has"),
    ],
)
def test_a_line_that_is_no_key_is_named_by_its_number_alone(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(KeyFileError) as refused:
        ApiKeys(write(tmp_path / "keys", text))
    assert problem in str(refused.value)
    assert "short" not in str(refused.value)
    assert "words" not in str(refused.value)


def test_keys_are_read_again_and_kept_where_the_file_is_bad(key_file: Path) -> None:
    keys = ApiKeys(key_file)
    write(key_file, "third-key-0123456789ab")
    keys.reload()
    assert keys.admit("third-key-0123456789ab")
    assert not keys.admit(KEYS[0])
    key_file.chmod(0o640)
    with pytest.raises(KeyFileError):
        keys.reload()
    key_file.unlink()
    with pytest.raises(KeyFileError):
        keys.reload()
    assert keys.admit("third-key-0123456789ab")


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong-key-0123456789ab"},
     {"authorization": f"Basic {KEYS[0]}"}, {"x-api-key": "wrong"}, {"authorization": KEYS[0]},
     {"authorization": "Bearer wrong", "x-api-key": KEYS[0]}],
)  # fmt: skip
def test_without_a_key_the_answer_is_401_with_openai_s_error_object(
    kit: Any, key_file: Path, headers: dict[str, str]
) -> None:
    response = ask(kit, ApiKeys(key_file), "POST", "/v1/chat/completions", headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert KEYS[0] not in response.text
    assert kit.backend.requests == []


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEYS[0]}"}, {"authorization": f"bearer  {KEYS[1]} "}, {"x-api-key": KEYS[1]}],
)
def test_with_a_key_a_request_is_served(kit: Any, key_file: Path, headers: dict[str, str]) -> None:
    response = ask(kit, ApiKeys(key_file), "GET", "/v1/models", headers)
    assert response.status_code == 200


def test_anthropic_s_endpoint_refuses_in_anthropic_s_shape(kit: Any, key_file: Path) -> None:
    response = ask(kit, ApiKeys(key_file), "POST", "/v1/messages", {})
    assert response.status_code == 401
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "authentication_error"


def test_everything_but_health_and_the_pages_needs_a_key(kit: Any, key_file: Path) -> None:
    keys = ApiKeys(key_file)
    served = {
        (operation.method, operation.path)
        for operation in OPERATIONS
        if ask(kit, keys, operation.method, operation.path.replace("{model}", "tiny"), {}).status_code != 401
    }
    assert served == {("GET", "/health"), ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json")}
    # A path that is not served tells nobody that it is not.
    assert ask(kit, keys, "GET", "/nothing", {}).status_code == 401
