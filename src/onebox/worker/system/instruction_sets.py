"""Which instruction sets the libraries of this process use, as they say themselves, and what the processor has.

oneDNN has no function in Python that tells; with its messages switched on it says it before the first operator.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from onebox.wire.protocol.responses import InstructionSets

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""What a user limits instruction sets by: of ATen, of oneDNN (with its earlier name), and of MKL."""

_HARDWARE = {
    "AVX2": "_is_avx2_supported",
    "AVX-512": "_is_avx512_supported",
    "VNNI": "_is_vnni_supported",
    "bf16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
    "AMX fp16": "_is_amx_fp16_supported",
}
"""By instruction set the function of ``torch.cpu`` that knows of it; they have no public names."""

_ISA = re.compile(r"^onednn_verbose,.*\bcpu,isa:(?:Intel )?(.*)$", re.MULTILINE)
_MKL = re.compile(r"^MKL_VERBOSE .*? architecture (.*), \w+ [\d.]+GHz", re.MULTILINE)

_ASKING = threading.Lock()
"""Libraries answer once, to whichever thread asks first, on an output that all threads share."""


def used_instruction_sets() -> InstructionSets:
    """Return the instruction sets that this process uses; found out once, within milliseconds.

    MKL is asked by nothing here: it would first measure the frequency of the processor for a quarter of a second; see
    :func:`mkl_architecture`.
    """
    with _ASKING:
        return _instructions()


def mkl_architecture() -> str:
    """Return for which processor MKL says that it computes: empty where this torch has no MKL."""
    with _ASKING:
        return _words_of_mkl()


@functools.cache
def _instructions() -> InstructionSets:
    hardware = tuple(name for name, test in _HARDWARE.items() if getattr(torch.cpu, test)())
    return InstructionSets(torch.backends.cpu.get_cpu_capability(), _words_of_onednn(), processor_vendor(), hardware)


@functools.cache
def _words_of_mkl() -> str:
    if not torch.backends.mkl.is_available():
        return ""
    with _overheard() as said, torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
        some = torch.ones(2, 2, dtype=torch.float32, device="cpu")  # whatever the defaults are
        some @ some
    found = _MKL.search(_text(said))
    return found[1] if found else ""


def _words_of_onednn() -> str:
    """Return the instruction set that oneDNN says it uses: empty where this torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return ""
    with _overheard() as said, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        one = torch.ones(1, 1, 1, 1, dtype=torch.float32, device="cpu")  # whatever the defaults are
        torch.ops.aten.mkldnn_convolution(one, one, None, [0, 0], [1, 1], [1, 1], 1)
    found = _ISA.search(_text(said))
    return found[1] if found else ""


@contextmanager
def _overheard() -> Iterator[int]:
    """Catch what libraries print to standard output; give a descriptor to read it from, closed by :func:`_text`."""
    libc = ctypes.CDLL(None)
    said = os.memfd_create("onebox-said", os.MFD_CLOEXEC)
    libc.fflush(None)
    kept = os.dup(1)
    os.dup2(said, 1)
    try:
        yield said
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _text(said: int) -> str:
    try:
        return os.pread(said, 1 << 16, 0).decode(errors="replace")
    finally:
        os.close(said)


def processor_vendor() -> str:
    """Return who has made the processor, as it says itself (``GenuineIntel``); empty where nothing tells."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("vendor_id"):
            return line.split(":", 1)[1].strip()
    return ""
