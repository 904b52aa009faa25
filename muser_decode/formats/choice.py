"""Which message format a checkpoint speaks, told by its control tokens."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2
from jinja2 import meta

from muser_decode.formats.base import MessageFormat, Style
from muser_decode.formats.chatml_hermes import ChatmlHermes
from muser_decode.formats.gemma import Gemma
from muser_decode.formats.muse import Muse
from muser_decode.formats.tagged import THINK

FORMATS: tuple[tuple[frozenset[str], MessageFormat], ...] = (
    (frozenset({"<|start|>", "<|message|>", "<|eom|>", "<|eot|>"}), Muse()),
    (frozenset({"<start_of_turn>", "<end_of_turn>"}), Gemma()),
    (frozenset({"<|im_start|>", "<|im_end|>"}), ChatmlHermes()),
)
"""The control tokens that mark a format, and the format. The first that a vocabulary has counts."""


def choose(special_ids: Mapping[str, int]) -> MessageFormat:
    """Return the format of a vocabulary; Hermes-style tags, which are plain text, where none is recognised."""
    return recognised(special_ids) or ChatmlHermes()


def recognised(special_ids: Mapping[str, int]) -> MessageFormat | None:
    """Return the format whose control tokens a vocabulary has, if there is one."""
    return next((form for marks, form in FORMATS if marks <= special_ids.keys()), None)


def style_of(source: str, environment: jinja2.Environment) -> Style:
    """Return what a template can do, by the names that it reads. `source` has compiled in `environment`."""
    names = meta.find_undeclared_variables(environment.parse(source))
    return Style(takes_tools="tools" in names, thinks=THINK in source, variables=frozenset(names))
