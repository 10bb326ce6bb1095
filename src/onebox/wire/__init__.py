"""Message types, tensor framing and the encrypted channel between a client and its workers.

Public names are imported at first use: what talks to agents needs no PyTorch, whose import takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebox.wire.attention import ATTENTION, ATTENTION_BACKWARD, fits_fused
    from onebox.wire.channel import (
        Connection,
        KeyPair,
        configure,
        detect_dead_peers,
        listen,
        new_keys,
        receive,
        send,
        send_tracked,
    )
    from onebox.wire.compression import MOST_BYTES, Codec, codecs, pack, unpack
    from onebox.wire.operators import is_known, is_random, overload, shares_memory
    from onebox.wire.program import (
        PROGRAM_TYPES,
        Complex,
        DType,
        LayoutArgument,
        Many,
        MemoryFormat,
        Operator,
        OwnDevice,
        Program,
        SlotArgument,
        TensorSpec,
        Value,
        check,
        reads,
        specs_by_slot,
        with_deaths,
    )
    from onebox.wire.protocol.codec import check_frames, decode_envelope, decode_worker_message, encode
    from onebox.wire.protocol.eager import (
        FREE,
        Argument,
        BlockSpec,
        GeneratorArgument,
        GeneratorSpec,
        Hole,
        Items,
        KernelSpec,
        Strided,
    )
    from onebox.wire.receive_watch import SMALL_BYTES, ConnectionEvent, Overrun, ReceiveWatch, connection_of, socket_of
    from onebox.wire.recurrent import KINDS as RECURRENT_KINDS
    from onebox.wire.recurrent import RECURRENT, RECURRENT_BACKWARD
    from onebox.wire.reliable import Restarted, held_bytes
    from onebox.wire.tensors import (
        DTYPES,
        check_elements,
        dtype_name,
        elements_of,
        from_frame,
        program_dtype_name,
        rows_of,
        spec_of,
        to_frame,
    )

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "DTYPES",
    "FREE",
    "MOST_BYTES",
    "PROGRAM_TYPES",
    "RECURRENT",
    "RECURRENT_BACKWARD",
    "RECURRENT_KINDS",
    "SMALL_BYTES",
    "Argument",
    "BlockSpec",
    "Codec",
    "Complex",
    "Connection",
    "ConnectionEvent",
    "DType",
    "GeneratorArgument",
    "GeneratorSpec",
    "Hole",
    "Items",
    "KernelSpec",
    "KeyPair",
    "LayoutArgument",
    "Many",
    "MemoryFormat",
    "Operator",
    "Overrun",
    "OwnDevice",
    "Program",
    "ReceiveWatch",
    "Restarted",
    "SlotArgument",
    "Strided",
    "TensorSpec",
    "Value",
    "check",
    "check_elements",
    "check_frames",
    "codecs",
    "configure",
    "connection_of",
    "decode_envelope",
    "decode_worker_message",
    "detect_dead_peers",
    "dtype_name",
    "elements_of",
    "encode",
    "fits_fused",
    "from_frame",
    "held_bytes",
    "is_known",
    "is_random",
    "listen",
    "new_keys",
    "overload",
    "pack",
    "program_dtype_name",
    "reads",
    "receive",
    "rows_of",
    "send",
    "send_tracked",
    "shares_memory",
    "socket_of",
    "spec_of",
    "specs_by_slot",
    "to_frame",
    "unpack",
    "with_deaths",
]

_NAMES = {
    "onebox.wire.attention": (
        "ATTENTION",
        "ATTENTION_BACKWARD",
        "fits_fused",
    ),
    "onebox.wire.channel": (
        "Connection",
        "KeyPair",
        "configure",
        "detect_dead_peers",
        "listen",
        "new_keys",
        "receive",
        "send",
        "send_tracked",
    ),
    "onebox.wire.compression": (
        "Codec",
        "MOST_BYTES",
        "codecs",
        "pack",
        "unpack",
    ),
    "onebox.wire.operators": (
        "is_known",
        "is_random",
        "overload",
        "shares_memory",
    ),
    "onebox.wire.program": (
        "Complex",
        "DType",
        "LayoutArgument",
        "Many",
        "MemoryFormat",
        "Operator",
        "OwnDevice",
        "PROGRAM_TYPES",
        "Program",
        "SlotArgument",
        "TensorSpec",
        "Value",
        "check",
        "reads",
        "specs_by_slot",
        "with_deaths",
    ),
    "onebox.wire.protocol.codec": (
        "check_frames",
        "decode_envelope",
        "decode_worker_message",
        "encode",
    ),
    "onebox.wire.protocol.eager": (
        "Argument",
        "BlockSpec",
        "FREE",
        "GeneratorArgument",
        "GeneratorSpec",
        "Hole",
        "Items",
        "KernelSpec",
        "Strided",
    ),
    "onebox.wire.receive_watch": (
        "ConnectionEvent",
        "Overrun",
        "ReceiveWatch",
        "SMALL_BYTES",
        "connection_of",
        "socket_of",
    ),
    "onebox.wire.recurrent": (
        "RECURRENT",
        "RECURRENT_BACKWARD",
    ),
    "onebox.wire.reliable": (
        "Restarted",
        "held_bytes",
    ),
    "onebox.wire.tensors": (
        "DTYPES",
        "check_elements",
        "dtype_name",
        "elements_of",
        "from_frame",
        "program_dtype_name",
        "rows_of",
        "spec_of",
        "to_frame",
    ),
}
_HOMES = {name: (module, name) for module, names in _NAMES.items() for name in names} | {
    "RECURRENT_KINDS": ("onebox.wire.recurrent", "KINDS"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onebox.wire' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
