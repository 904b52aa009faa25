"""Tools and the choice among them, read from a chat completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from muser_decode.api.errors import invalid, unsupported
from muser_decode.api.fields import Fields, as_fields, shown, wrong_type
from muser_decode.api.limits import MAX_TOOLS
from muser_decode.formats.conversation import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


HOSTED = ("web_search", "web_fetch", "image_generation", "tool_search", "namespace")
"""How the types of tools begin that agents offer along with their own, whether or not a server has them.

An offer is no demand: an answer that searched nothing is one that the model might have given anyway.
"""


@dataclass(frozen=True)
class Toolbox:
    """The tools that an answer may call. `required`: it must call one; not `parallel`: one at most.

    `ignored` are the types of offered tools that this server does not have. `texts` names the tools whose input is
    a text and no object: the model sees them as functions of one argument, `TEXT_INPUT`.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True
    ignored: tuple[str, ...] = ()
    texts: frozenset[str] = frozenset()


TEXT_INPUT = "input"


def read_toolbox(fields: Fields) -> Toolbox:
    """Return the tools of a chat, narrowed by `tool_choice`.

    Raises:
        ApiError: 400, the first field that is missing, of a wrong type or not supported.
    """
    items = check_count(fields.array("tools") or [])
    tools = tuple(_tool(as_fields(item, f"tools[{index}]")) for index, item in enumerate(items))
    parallel = fields.boolean("parallel_tool_calls")
    return chosen(fields.raw("tool_choice"), tools, parallel is not False)


def hosted(fields: Fields) -> bool:
    """Say whether a tool is one of those that a server may have and this one has not."""
    return (fields.text("type") or "").startswith(HOSTED)


def text_tool(fields: Fields) -> Tool:
    """Return a tool whose input is a text, from OpenAI's object of type `custom`.

    Raises:
        ApiError: 400.
    """
    form = fields.object("format")
    definition = None if form is None else form.text("definition")
    parameters = {"type": "object", "properties": {TEXT_INPUT: {"type": "string"}}, "required": [TEXT_INPUT]}
    tool = read_function(Fields({"name": fields.raw("name"), "description": fields.raw("description")}), "parameters")
    told = tool.description if definition is None else f"{tool.description}\nIts input follows:\n{definition}"
    return replace(tool, description=told, parameters={**parameters, "additionalProperties": False})


def check_count(items: list[object]) -> list[object]:
    """Return the items of `tools`.

    Raises:
        ApiError: 400, too many.
    """
    if len(items) > MAX_TOOLS:
        raise invalid("tools", f"Invalid 'tools': expected at most {MAX_TOOLS} tools, got {len(items)}.")
    return items


def _tool(fields: Fields) -> Tool:
    kind = fields.text("type")
    if kind != "function":
        raise unsupported(fields.param("type"), f"Tools of type {shown(kind)} are not supported: expected 'function'.")
    function = fields.object("function")
    if function is None:
        raise fields.missing("function")
    return read_function(function, "parameters")


def read_function(fields: Fields, schema: str) -> Tool:
    """Return a tool from the object that has its name, description and JSON schema.

    Raises:
        ApiError: 400.
    """
    name = fields.text("name")
    if name is None:
        raise fields.missing("name")
    if not _NAME.fullmatch(name):
        param = fields.param("name")
        raise invalid(param, f"Invalid {param!r}: expected 1 to 128 letters, digits, '_', '-' or '.'.")
    parameters = fields.object(schema)
    given = {} if parameters is None else parameters.values()
    return Tool(name, fields.text("description") or "", given, fields.boolean("strict") or False)


def chosen(choice: object, tools: tuple[Tool, ...], parallel: bool, kinds: tuple[str, ...] = ("function",)) -> Toolbox:
    """Return what OpenAI's `tool_choice` makes of the tools. `kinds` are the types of those that it may name.

    Raises:
        ApiError: 400.
    """
    if choice is None or choice == "auto":
        return Toolbox(tools, parallel=parallel)
    if choice == "none":
        return Toolbox()
    if choice == "required":
        return required(tools, parallel)
    if isinstance(choice, str):
        raise invalid("tool_choice", f"Invalid 'tool_choice': {shown(choice)}; expected none, auto or required.")
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "a string or an object", choice)
    fields = as_fields(choice, "tool_choice")
    if fields.text("type") not in kinds:
        raise unsupported("tool_choice", f"Unsupported 'tool_choice': {shown(choice)}.")
    # The responses endpoint has the name at the top, chats below `function`.
    name = (fields.object("function") or fields).text("name")
    return only(tools, name, parallel)


def only(tools: Sequence[Tool], name: str | None, parallel: bool) -> Toolbox:
    """Return the toolbox of an answer that must call this tool.

    Raises:
        ApiError: 400, there is none of this name.
    """
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        raise invalid("tool_choice", f"Invalid 'tool_choice': no tool is named {shown(name)}.")
    return Toolbox(named, required=True, parallel=parallel)


def required(tools: tuple[Tool, ...], parallel: bool) -> Toolbox:
    """Return the toolbox of an answer that must call one of the tools.

    Raises:
        ApiError: 400, there are none.
    """
    if not tools:
        raise invalid("tool_choice", "Invalid 'tool_choice': a call is required and there are no tools.")
    return Toolbox(tools, required=True, parallel=parallel)
