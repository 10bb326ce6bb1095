"""What the libraries of a process say of the instruction sets that they use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from onebox.worker.system.instruction_sets import _MKL, VARIABLES, mkl_architecture, used_instruction_sets

ASK = """
from onebox.worker.system.instruction_sets import used_instruction_sets
print(used_instruction_sets().aten, used_instruction_sets().onednn, sep="|")
"""


def limited(aten: str, onednn: str) -> list[str]:
    """Return what a process whose libraries are limited says of ATen and oneDNN."""
    free = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = free | {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    run = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip().split("|")


def test_each_library_is_named() -> None:
    """A new torch that says it in other words, or knows the processor by other functions, fails here."""
    found = used_instruction_sets()
    assert found.aten == torch.backends.cpu.get_cpu_capability()
    assert found.onednn.startswith(("AVX", "SSE"))
    assert ("AVX2" in found.hardware) == torch.cpu._is_avx2_supported()
    assert ("bf16" in found.hardware) == torch.cpu._is_avx512_bf16_supported()
    assert mkl_architecture().startswith("Intel(R) ") or not torch.backends.mkl.is_available()


@pytest.mark.parametrize(
    "words",
    [
        "Intel(R) Architecture processors",
        "Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with support for INT8, BF16, FP16 (limited) "
        "instructions, and Intel(R) Advanced Matrix Extensions (Intel(R) AMX) with INT8 and BF16",
    ],
)
def test_what_mkl_says_is_taken_whole(words: str) -> None:
    """The words have commas where the processor has much to name."""
    line = f"MKL_VERBOSE oneMKL 2024.0 Update 2 for Intel(R) 64 architecture {words}, Lnx 2.00GHz lp64 gnu_thread"
    found = _MKL.search(f"{line}\nMKL_VERBOSE SGEMM(N,N,4,4,4) 72.89us CNR:OFF Dyn:1\n")
    assert found is not None
    assert found[1] == words


def test_limits_are_seen() -> None:
    """What a user limits libraries to is what they say, whatever the processor has; nothing of it is printed."""
    assert limited("default", "SSE41") == ["DEFAULT", "SSE4.1"]
    if "AVX2" in used_instruction_sets().hardware:
        assert limited("avx2", "AVX2") == ["AVX2", "AVX2"]


def test_threads_that_ask_at_once_hear_the_same() -> None:
    """oneDNN says it once a process: whoever asks meanwhile waits for that."""
    at_once = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from onebox.worker.system.instruction_sets import used_instruction_sets
together = Barrier(4)
def ask(_):
    together.wait(30)
    return used_instruction_sets().onednn
with ThreadPoolExecutor(4) as threads:
    print(*threads.map(ask, range(4)), sep="|")
"""
    run = subprocess.run([sys.executable, "-c", at_once], capture_output=True, text=True, check=True)
    assert run.stdout.strip().split("|") == [used_instruction_sets().onednn] * 4


def test_the_defaults_of_the_process_do_not_matter() -> None:
    """A probe in float64, or on a device without memory, would fail, or see nothing."""
    ask = f"import torch; torch.set_default_dtype(torch.float64); torch.set_default_device('meta'); {ASK}"
    run = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    found = used_instruction_sets()
    assert run.stdout.strip() == f"{found.aten}|{found.onednn}"
