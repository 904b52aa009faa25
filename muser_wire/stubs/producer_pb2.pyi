from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WindowPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WINDOW_POLICY_UNSPECIFIED: _ClassVar[WindowPolicy]
    WINDOW_POLICY_FINAL: _ClassVar[WindowPolicy]
    WINDOW_POLICY_ROLLING: _ClassVar[WindowPolicy]

class FrameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_KIND_UNSPECIFIED: _ClassVar[FrameKind]
    FRAME_KIND_BEGIN: _ClassVar[FrameKind]
    FRAME_KIND_SEGMENT: _ClassVar[FrameKind]
    FRAME_KIND_SEAL: _ClassVar[FrameKind]
    FRAME_KIND_ABORT: _ClassVar[FrameKind]
WINDOW_POLICY_UNSPECIFIED: WindowPolicy
WINDOW_POLICY_FINAL: WindowPolicy
WINDOW_POLICY_ROLLING: WindowPolicy
FRAME_KIND_UNSPECIFIED: FrameKind
FRAME_KIND_BEGIN: FrameKind
FRAME_KIND_SEGMENT: FrameKind
FRAME_KIND_SEAL: FrameKind
FRAME_KIND_ABORT: FrameKind

class Identities(_message.Message):
    __slots__ = ("spec_digest", "tokenizer_digest", "kv_layout", "lane", "numerics_digest", "chunk_tokens", "weights_digest")
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    spec_digest: bytes
    tokenizer_digest: bytes
    kv_layout: str
    lane: str
    numerics_digest: bytes
    chunk_tokens: int
    weights_digest: bytes
    def __init__(self, spec_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., kv_layout: _Optional[str] = ..., lane: _Optional[str] = ..., numerics_digest: _Optional[bytes] = ..., chunk_tokens: _Optional[int] = ..., weights_digest: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "identities", "spec_json", "incarnation", "node_key", "data_port", "max_prompt_tokens", "kernels", "predicted_wait_ns", "predicted_chunk_ns", "cache_nbytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_KEY_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_CHUNK_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NBYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    identities: Identities
    spec_json: bytes
    incarnation: bytes
    node_key: bytes
    data_port: int
    max_prompt_tokens: int
    kernels: _containers.RepeatedScalarFieldContainer[str]
    predicted_wait_ns: int
    predicted_chunk_ns: int
    cache_nbytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., identities: _Optional[_Union[Identities, _Mapping]] = ..., spec_json: _Optional[bytes] = ..., incarnation: _Optional[bytes] = ..., node_key: _Optional[bytes] = ..., data_port: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., kernels: _Optional[_Iterable[str]] = ..., predicted_wait_ns: _Optional[int] = ..., predicted_chunk_ns: _Optional[int] = ..., cache_nbytes: _Optional[int] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("protocol_version", "handoff_id", "expected", "incarnation", "token_ids", "held_tokens", "window_policy", "secret", "allow_unqualified")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_POLICY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNQUALIFIED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    handoff_id: bytes
    expected: Identities
    incarnation: bytes
    token_ids: bytes
    held_tokens: int
    window_policy: WindowPolicy
    secret: bytes
    allow_unqualified: bool
    def __init__(self, protocol_version: _Optional[int] = ..., handoff_id: _Optional[bytes] = ..., expected: _Optional[_Union[Identities, _Mapping]] = ..., incarnation: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., held_tokens: _Optional[int] = ..., window_policy: _Optional[_Union[WindowPolicy, str]] = ..., secret: _Optional[bytes] = ..., allow_unqualified: _Optional[bool] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("ticket", "schedule_digest", "predicted_chunk_ns", "predicted_wait_ns")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_CHUNK_NS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    schedule_digest: bytes
    predicted_chunk_ns: int
    predicted_wait_ns: int
    def __init__(self, ticket: _Optional[bytes] = ..., schedule_digest: _Optional[bytes] = ..., predicted_chunk_ns: _Optional[int] = ..., predicted_wait_ns: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("accepted", "refusal")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    refusal: Refusal
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("kind", "position")
    KIND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    kind: FrameKind
    position: int
    def __init__(self, kind: _Optional[_Union[FrameKind, str]] = ..., position: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("header", "body")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    body: bytes
    def __init__(self, header: _Optional[bytes] = ..., body: _Optional[bytes] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("handoff_id", "identities", "incarnation", "schedule_digest", "segments", "payload_nbytes")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    handoff_id: bytes
    identities: Identities
    incarnation: bytes
    schedule_digest: bytes
    segments: int
    payload_nbytes: int
    def __init__(self, handoff_id: _Optional[bytes] = ..., identities: _Optional[_Union[Identities, _Mapping]] = ..., incarnation: _Optional[bytes] = ..., schedule_digest: _Optional[bytes] = ..., segments: _Optional[int] = ..., payload_nbytes: _Optional[int] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("transcript_digest", "segments", "payload_nbytes", "prefill_ns", "signature", "reused_tokens")
    TRANSCRIPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    transcript_digest: bytes
    segments: int
    payload_nbytes: int
    prefill_ns: int
    signature: bytes
    reused_tokens: int
    def __init__(self, transcript_digest: _Optional[bytes] = ..., segments: _Optional[int] = ..., payload_nbytes: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., signature: _Optional[bytes] = ..., reused_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("protocol_version", "payload")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    payload: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class OpenProbeRequest(_message.Message):
    __slots__ = ("protocol_version", "nbytes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    nbytes: int
    def __init__(self, protocol_version: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class OpenProbeResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class ProbePiece(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...
