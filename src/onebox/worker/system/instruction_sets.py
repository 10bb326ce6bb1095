"""Instruction sets used by the libraries of this process, as reported by themselves, and those of the processor.

oneDNN has no Python function for it; with verbose messages enabled it prints it before the first operator.
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
"""Environment variables that limit instruction sets: of ATen, of oneDNN (including its earlier name), and of MKL."""

_HARDWARE = {
    "AVX2": "_is_avx2_supported",
    "AVX-512": "_is_avx512_supported",
    "VNNI": "_is_vnni_supported",
    "bf16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
    "AMX fp16": "_is_amx_fp16_supported",
}
"""Function of ``torch.cpu`` for each instruction set; they have no public names."""

_ISA = re.compile(r"^onednn_verbose,.*\bcpu,isa:(?:Intel )?(.*)$", re.MULTILINE)
_MKL = re.compile(r"^MKL_VERBOSE .*? architecture (.*), \w+ [\d.]+GHz", re.MULTILINE)

_ASKING = threading.Lock()
"""Libraries report once, to the first thread that asks, on an output that all threads share."""


def used_instruction_sets() -> InstructionSets:
    """Return the instruction sets that this process uses; detected once, within milliseconds.

    MKL is not queried here: it would first measure the processor's frequency for a quarter of a second; see
    :func:`mkl_architecture`.
    """
    with _ASKING:
        return _instructions()


def mkl_architecture() -> str:
    """Return the processor type that MKL reports to use; empty if this torch has no MKL."""
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
        some = torch.ones(2, 2, dtype=torch.float32, device="cpu")  # independent of the defaults
        some @ some
    found = _MKL.search(_text(said))
    return found[1] if found else ""


def _words_of_onednn() -> str:
    """Return the instruction set that oneDNN reports to use; empty if this torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return ""
    with _overheard() as said, torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        one = torch.ones(1, 1, 1, 1, dtype=torch.float32, device="cpu")  # independent of the defaults
        torch.ops.aten.mkldnn_convolution(one, one, None, [0, 0], [1, 1], [1, 1], 1)
    found = _ISA.search(_text(said))
    return found[1] if found else ""


@contextmanager
def _overheard() -> Iterator[int]:
    """Capture output of libraries to standard output; yield a descriptor to read it from, closed by :func:`_text`."""
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
    """Return the processor's vendor as it reports it (``GenuineIntel``); empty if unknown."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("vendor_id"):
            return line.split(":", 1)[1].strip()
    return ""
