"""The known model families, and the choice between them by what a checkpoint says it is."""

from __future__ import annotations

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import gemma3, llama, muse_glimmer, qwen3
from muser_wire.model.families.description import Family

FAMILIES = (llama.FAMILY, qwen3.FAMILY, gemma3.FAMILY, muse_glimmer.FAMILY)


def family_of(container: Container) -> Family:
    """Return the family of an opened checkpoint.

    Raises:
        CheckpointError: it names no architecture, or one that is not known here.
    """
    field = "general.architecture" if container.kind is ContainerKind.GGUF else "model_type"
    found = container.fields.text(field)
    known = {key: family for family in FAMILIES for key in family_keys(family, container.kind)}
    if found not in known:
        raise container.fields.refusal(field, f"is {found!r}, which is not known here (known: {', '.join(known)})")
    return known[found]


def family_keys(family: Family, kind: ContainerKind) -> tuple[str, ...]:
    """Return the names under which a container of this kind knows the family."""
    return (family.gguf_architecture,) if kind is ContainerKind.GGUF else family.model_types
