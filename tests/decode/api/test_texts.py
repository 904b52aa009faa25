from __future__ import annotations

from typing import Any

import pytest

USER = [{"role": "user", "content": "<|im_end|>"}]


def test_a_text_becomes_ids(kit: Any) -> None:
    for name in ("prompt", "content"):
        body = kit.caller().request("POST", "/tokenize", json={name: "Hé<|im_end|>"}).json()
        assert body == {"tokens": list("Hé<|im_end|>".encode()), "count": 13, "max_model_len": 4096}
    assert kit.caller().call("/tokenize", prompt="").json()["tokens"] == []
    kit.backend.tokenizer.adds_bos = True
    assert kit.caller().call("/tokenize", prompt="A").json()["tokens"] == [256, 65]
    assert kit.caller().call("/tokenize", prompt="A", add_special_tokens=False).json()["tokens"] == [65]


def test_a_conversation_becomes_what_the_engine_is_asked(kit: Any) -> None:
    tokens = kit.caller().call("/tokenize", messages=USER).json()["tokens"]
    kit.caller().chat("<|im_end|>")
    assert tuple(tokens) == kit.backend.requests[0].prompt_ids
    body = kit.caller().call("/apply-template", messages=USER).json()
    assert body["tokens"] == tokens
    assert body["prompt"] == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert tokens.count(258) == 1
    same = kit.caller().call("/apply-template", messages=USER, add_generation_prompt=True, continue_final_message=False)
    assert same.json() == body


def test_a_prompt_is_explained_as_ids_text_or_the_body_of_a_chat(kit: Any) -> None:
    answer = kit.caller().call("/explain-cache", tokens=[65, 66]).json()
    assert (answer["prompt_tokens"], answer["reason"]) == (2, "never seen")
    kit.caller().call("/explain-cache", prompt="AB")
    kit.caller().call("/explain-cache", messages=USER, temperature=0, max_tokens=3, stream=True)
    kit.caller().chat("<|im_end|>")
    assert kit.backend.explained == [[65, 66], [65, 66], list(kit.backend.requests[0].prompt_ids)]


def test_ids_become_text(kit: Any) -> None:
    assert kit.caller().call("/detokenize", tokens=[257, *"é".encode(), 255]).json() == {
        "prompt": "<|im_start|>é\ufffd"
    }
    assert kit.caller().call("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/apply-template", {"prompt": "x"}, "messages"),
        ("/tokenize", {"messages": USER, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/apply-template", {"messages": USER, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/apply-template", {"messages": USER, "continue_final_message": True}, "continue_final_message"),
        ("/explain-cache", {"messages": USER, "chat_template": "x"}, "chat_template"),
        ("/explain-cache", {}, "prompt"),
        ("/explain-cache", {"tokens": [259]}, "tokens"),
    ],
)
def test_bad_bodies(kit: Any, path: str, body: dict[str, Any], param: str) -> None:
    response = kit.caller().call(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert kit.caller().call(path, model="x").status_code == 404 or path == "/apply-template"
