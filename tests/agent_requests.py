"""Requests as two coding agents write them, with every field that they are known to send."""

from __future__ import annotations

from typing import Any

WORDS = "Runs a command and returns what it printed."


def parameters(*names: str) -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {name: {"type": "string", "description": WORDS} for name in names}
        | {
            "timeout": {"type": "number", "description": "milliseconds"},
            "url": {"type": "string", "format": "uri"},
            "edits": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"old": {"type": "string"}, "all": {"type": "boolean", "default": False}},
                    "required": ["old"],
                    "additionalProperties": False,
                },
            },
            "options": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        },
        "required": list(names),
        "additionalProperties": False,
    }


CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>\n  <cwd>/src</cwd>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABo"},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":"ls"}',
            "call_id": "call_1",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py","metadata":{"exit_code":0}}'},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done."},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
    ],
    "tools": [
        *(
            {
                "type": "function",
                "name": name,
                "description": WORDS,
                "strict": False,
                "parameters": parameters("command"),
            }
            for name in ("shell", "update_plan", "view_image")
        ),
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "none", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c6f0",
    "service_tier": "auto",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "max_output_tokens": 24,
}

CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 24,
    "system": [
        {"type": "text", "text": "x-billing-header: v=2"},
        {
            "type": "text",
            "text": "You are a coding agent.",
            "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "EqQB"},
                {"type": "redacted_thinking", "data": "EmwK"},
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "Bash",
                    "input": {"command": "ls"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False},
                {"type": "text", "text": "Which ones?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_2", "name": "ToolSearch", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
                }
            ],
        },
    ],
    "tools": [
        *(
            {
                "name": name,
                "description": WORDS,
                "input_schema": parameters("command"),
                "eager_input_streaming": True,
                "cache_control": {"type": "ephemeral"},
            }
            for name in ("Bash", "Edit", "WebFetch", "ToolSearch", *(f"mcp__server__tool_{n}" for n in range(4)))
        ),
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "diagnostics": {"previous_message_id": None},
    "metadata": {"user_id": "user_1"},
    "temperature": 1,
    "stream": True,
}
