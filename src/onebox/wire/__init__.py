"""Message types, tensor framing and the encrypted channel between a client and its workers."""

from onebox.wire.channel import KeyPair, check_frames, configure, decode_envelope, decode_saying, encode, new_keys
from onebox.wire.operators import is_random, overload, shares_memory
from onebox.wire.program import (
    DType,
    Layout,
    Many,
    MemoryFormat,
    Operator,
    OwnDevice,
    Program,
    Slot,
    TensorSpec,
    Value,
    check,
    reads,
    specs_by_slot,
    with_deaths,
)
from onebox.wire.tensors import DTYPES, check_elements, dtype_name, from_frame, spec_of, to_frame

__all__ = [
    "DTYPES",
    "DType",
    "KeyPair",
    "Layout",
    "Many",
    "MemoryFormat",
    "Operator",
    "OwnDevice",
    "Program",
    "Slot",
    "TensorSpec",
    "Value",
    "check",
    "check_elements",
    "check_frames",
    "configure",
    "decode_envelope",
    "decode_saying",
    "dtype_name",
    "encode",
    "from_frame",
    "is_random",
    "new_keys",
    "overload",
    "reads",
    "shares_memory",
    "spec_of",
    "specs_by_slot",
    "to_frame",
    "with_deaths",
]
