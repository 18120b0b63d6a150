"""Numerics id of an engine: different numerics, different bits."""

from __future__ import annotations

import sys

import pytest

from cotrain_workers.engine.facts import cpu_hardware, processor_of
from tests.warm.popen import run

ONE = """processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 167
stepping	: 8
cpu MHz		: 2000.000
cache size	: 107520 KB
flags		: fpu avx2 avx512f
bogomips	: 4000.00

processor	: 1
vendor_id	: GenuineIntel
"""

ROWS = """
from itertools import product
import torch
import cotrain_workers
generator = torch.Generator().manual_seed(0)
shapes = ((64, 64), (64, 256), (72, 131), (256, 512))
for threads, (inputs, outputs) in product((1, 2), shapes):
    torch.set_num_threads(threads)
    x = torch.randn(512, inputs, generator=generator)
    w = torch.randn(outputs, inputs, generator=generator)
    many = torch.mm(x, w.t()), torch.mm(w, x.t()).t()
    for rows in range(32, 512, 32):
        few = torch.mm(x[:rows], w.t()), torch.mm(w, x[:rows].t()).t()
        assert all(torch.equal(a, b[:rows]) for a, b in zip(few, many)), (threads, inputs, outputs, rows)
"""


@pytest.mark.parametrize(
    ("before", "after"), [("167", "143"), ("107520", "33792"), ("GenuineIntel", "AMD"), ("2 avx5", "2 fma avx5")]
)
def test_a_processor_of_another_kind_has_another_name(before: str, after: str) -> None:
    assert processor_of(ONE) != processor_of(ONE.replace(before, after))


@pytest.mark.parametrize(("before", "after"), [("2000.000", "3100.5"), ("4000.00", "1.0")])
def test_two_processors_of_the_same_kind_have_the_same_name(before: str, after: str) -> None:
    assert processor_of(ONE) == processor_of(ONE.replace(before, after))


def test_a_processor_with_another_description_has_a_name() -> None:
    arm = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40"
    assert processor_of(arm) != processor_of(arm.replace("0xd40", "0xd4f"))


def test_variables_that_override_the_libraries_are_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    before = cpu_hardware()
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    assert cpu_hardware() == f"{before} MKL_ENABLE_INSTRUCTIONS=AVX2"


@pytest.mark.parametrize("instructions", ["AVX2", ""])
def test_a_row_of_a_product_has_the_same_bits_among_32_and_more(
    monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    """Run in a process of its own, because MKL reads its settings at the first product. Every
    guarantee of equal bits depends on this.
    """
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if instructions:
        monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", instructions)
    ran = run([sys.executable, "-c", ROWS])
    assert ran.returncode == 0, ran.stderr
