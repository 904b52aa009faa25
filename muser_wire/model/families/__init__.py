"""The known model families, and the choice between them by what a checkpoint says it is."""

from __future__ import annotations

from muser_wire.model.container import Container, ContainerKind
from muser_wire.model.families import llama
from muser_wire.model.families.description import Family

FAMILIES = (llama.FAMILY,)


def family_of(container: Container) -> Family:
    """Return the family of an opened checkpoint.

    Raises:
        CheckpointError: it names no architecture, or one that is not known here.
    """
    field = "general.architecture" if container.kind is ContainerKind.GGUF else "model_type"
    found = container.fields.text(field)
    known = {family_key(family, container.kind): family for family in FAMILIES}
    if found not in known:
        raise container.fields.refusal(field, f"is {found!r}, which is not known here (known: {', '.join(known)})")
    return known[found]


def family_key(family: Family, kind: ContainerKind) -> str:
    """Return the name under which a container of this kind knows the family."""
    return family.gguf_architecture if kind is ContainerKind.GGUF else family.model_type
