"""Templates of loop kernels: filled in, they are what Numba makes of the kernel; the archive is complete."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlx.backends.cpu import loops, templates
from rlx.backends.cpu.kernels.cache import kv
from rlx.backends.cpu.kernels.packing import pack
from rlx.backends.cpu.kernels.rows import embedding, norm, quantize, reduce, rope
from rlx.backends.cpu.templates import Template
from rlx.ir import dtypes
from rlx.scalars import HOLE, Ptr, Scalar, f32, i32

TOOL = Path(__file__).parents[3] / "tools" / "lower_loops.py"
REMEDY = "run `python tools/lower_loops.py`: a loop kernel, the front end or a version has changed"

COUNT: int = HOLE
FACTOR: float = HOLE
WIDE: bool = HOLE


def scaled(x: Ptr, i: int) -> Scalar:
    return x[i * COUNT] * f32(FACTOR)


def _sums(x: Ptr, out: Ptr, begin: int, end: int) -> None:
    for i in range(begin, end):
        total = f32(0.0)
        for j in range(COUNT):
            total += scaled(x, i + j) if WIDE else x[i + j]
        out[i] = total + f32(i32(COUNT)) / f32(FACTOR)


@pytest.fixture
def archive_fits() -> None:
    """Skips a test of the archive where Numba or llvmlite is another than the archive was written with."""
    archive, installed = templates.archive(), templates.installed_versions()
    assert archive is not None, REMEDY
    for name in ("numba", "llvmlite"):
        if (archived := archive.versions[name]) != installed[name]:
            pytest.skip(f"the archive was written with {name} {archived}, {installed[name]} is installed")


def made(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Template:
    """The template of the kernel that a call makes."""
    found: list[Template] = []

    def keeping(*args: Any) -> Template:
        found.append(Template(*args))
        return found[-1]

    monkeypatch.setattr(loops, "Template", keeping)
    loops._lowered.cache_clear()
    monkeypatch.setattr(templates, "_known", {})
    make()
    return found[0]


def from_numba(template: Template, holes: Mapping[str, Any]) -> str:
    """What the front end makes of a kernel with its numbers in it."""
    from rlx.backends.cpu.numba_frontend import FRONTEND

    filled = loops.specialize(template.fn, holes)
    return FRONTEND.lower(filled, templates.NAME, template.types)


KERNELS: dict[str, Callable[[], object]] = {
    "norm": lambda: norm.rms_norm(96, 1e-5, out="q8a"),
    "quantize": lambda: quantize.quantize(96, "bf16"),
    "rope": lambda: rope.rope(3, 40, 24, "interleaved", norm_eps=1e-3, store="k_tiles", kv_dtype="f16"),
    "rope into blocks": lambda: rope.rope(2, 64, 64, "neox", store="k_tiles", kv_dtype="q8_0", wrap=True),
    "kv": lambda: kv.kv_write(3, 40, "bf16", wrap=True),
    "pack": lambda: pack.pack(dtypes.Q6_K),
    "embedding": lambda: embedding.embedding(dtypes.IQ4_XS, 512, scale=-3.5),  # has words beyond i64
    "top_k": lambda: reduce.top_k(33, 5),
}


@pytest.mark.usefixtures("archive_fits")
@pytest.mark.parametrize("name", KERNELS)
def test_a_template_of_the_archive_is_numbas_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = made(KERNELS[name], monkeypatch)
    assert template.shipped() is not None, REMEDY
    archive = templates.archive()
    if archive is None or archive.versions != templates.installed_versions():
        pytest.skip("another Python numbers basic blocks in another way")
    assert template.llvm() == from_numba(template, template.holes)


@pytest.mark.parametrize(("count", "factor"), [(1, 0.5), (-7, -1e300), (0, float("inf")), (1 << 62, 3.0)])
@pytest.mark.parametrize("wide", [False, True])
def test_any_number_can_be_filled_in(count: int, factor: float, wide: bool) -> None:
    holes = {"COUNT": count, "FACTOR": factor, "WIDE": wide}
    template = Template(_sums, holes, (scaled,), ("*f32", "*f32", "i64", "i64"), loops.specialize)
    assert template.shipped() is None, "the archive holds kernels of rlx"
    assert template.llvm() == from_numba(template, holes)


@pytest.mark.usefixtures("archive_fits")
def test_the_archive_has_every_template() -> None:
    """In a process of its own, because kernels without code must not stay in the caches of this one."""
    code = f"""
import sys
sys.path.insert(0, {str(TOOL.parent)!r})
import lower_loops
from rlx.backends.cpu.templates import Template

Template.llvm = lambda self: ""
found = lower_loops.templates()
print(len(found), [t.fn.__name__ for t in found if t.shipped() is None])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, missing = run.stdout.strip().partition(" ")
    assert int(count) > 100
    assert missing == "[]", REMEDY


@pytest.mark.usefixtures("archive_fits")
def test_a_changed_source_or_version_is_another_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template = made(KERNELS["norm"], monkeypatch)
    assert template.shipped() is not None, REMEDY
    for name in ("_source_digest", "_versions"):
        with monkeypatch.context() as changed:
            changed.setattr(templates, name, lambda *_: "another")
            other = made(KERNELS["norm"], changed)
            assert other.digest != template.digest
            assert other.shipped() is None


@pytest.mark.usefixtures("archive_fits")
def test_rlxs_own_kernels_need_no_numba() -> None:
    code = (
        "import sys; from rlx.backends.cpu.kernels.rows.norm import rms_norm; rms_norm(64, 1e-6); "
        "print('numba' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n", REMEDY
