"""Custom ops: registered, compiled, cached and verified like ours; wrong ones are refused by name."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import own_ops as own
import pytest

import rlx
from rlx import SEQ, CustomOpError, Graph, ops
from rlx.errors import VerificationError
from rlx.ir import custom, op_table
from rlx.store.cache import CompileCache
from rlx.store.store import Store

ROOT = Path(__file__).resolve().parent.parent.parent
RULE = "x[..., n] -> [..., n]"
RNG = np.random.default_rng(5)
pytestmark = pytest.mark.usefixtures("own_custom_ops")


def load(path: Path, name: str = "") -> ModuleType:
    """Runs a file as a module, anew."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def graph_of(make: Callable[..., Any], *shape: Any, **attrs: Any) -> Graph:
    graph = Graph("own")
    graph.output("y", make(graph.input("x", [SEQ, *(shape or (20,))]), **attrs))
    return graph


def define(meaning: Callable[..., Any], **options: Any) -> rlx.CustomOp:
    return custom.custom_op(**options)(meaning)


def scaled(kernel: Any = own.scaled_kernel, **options: Any) -> rlx.CustomOp:
    return define(own.scaled, shape=RULE, kernel=kernel, **options)


# -- an op with all of its parts ---------------------------------------------------------------------------------------


def gated_norm(x: np.ndarray, weight: np.ndarray, gate: np.ndarray, eps: float) -> np.ndarray:
    """With scalar loops over Python floats."""
    rows = []
    for row, own_gate in zip(x.reshape(-1, x.shape[-1]), gate.reshape(-1, x.shape[-1]), strict=True):
        size = (sum(float(v) ** 2 for v in row) / len(row) + eps) ** 0.5
        gates = [float(g) / (1 + math.exp(-g)) for g in own_gate]
        rows.append([v / size * w * g for v, w, g in zip(row, weight, gates, strict=True)])
    return np.array(rows).reshape(x.shape)


def test_the_example_fuses_its_formula(tmp_path: Path) -> None:
    example = load(ROOT / "examples" / "custom_op.py")
    kept = CompileCache(store=Store(tmp_path))
    weight = np.abs(array(70))
    graph = Graph("gated norm")
    x, gate = graph.input("x", [SEQ, 70]), graph.input("gate", [SEQ, 70])
    graph.output("y", example.formula(x, graph.weight("weight", [70]), gate, eps=1e-6))
    with rlx.compile(graph, bind={"weight": weight}, cache=kept) as exe:
        assert [n.op for n in exe.graph.nodes() if n.op not in ("input", "weight")] == ["gated_norm"]
        for rows in (1, 5, 33):
            x, gate = array(rows, 70), array(rows, 70)
            wanted = gated_norm(x, weight, gate, 1e-6)
            np.testing.assert_allclose(exe(x=x, gate=gate)["y"], wanted, atol=4e-6 * np.abs(wanted).max())
        report, source = exe.explain(), exe.source("gated_norm")
        assert [(e.rule, e.where) for e in report.passes[-4].done if e.rule == "gated_norm"] or "gated_norm" in str(
            report
        )
        (kernel,) = exe.kernels
        assert kernel.startswith("gated_norm_") and kernel in str(report)
        assert "total += x[i] * x[i]" in source and "n = 70" in source and "eps = " in source
        assert "define" in exe.llvm("gated_norm") and "ret" in exe.asm("gated_norm")
        assert "gated_norm(%x, %weight, %gate) {eps=1e-06}" in exe.ir("fuse")
    (key,) = (k for k in Store(tmp_path).stored_keys() if k.kind == "program")
    assert key.options["custom_ops"] == {"gated_norm": example.gated_norm.digest}
    entry = Store(tmp_path).open(key.digest)
    assert "def gated_norm" in entry.read("ops/gated_norm.txt").decode()
    assert "def kernel" in entry.read("ops/gated_norm.txt").decode()


def test_a_decode_step_and_the_reference_device(cache: CompileCache) -> None:
    op = define(own.glu, shape="x[..., 2*n] -> [..., n]", kernel=own.glu_kernel)
    graph = Graph("glu")
    graph.output("y", ops.linear(op(graph.input("x", [SEQ, 24])), graph.weight("w", [16, 12])))
    weight, x = array(16, 12), array(1, 24)
    wanted = (x[:, :12] / (1 + np.exp(-x[:, 12:]))) @ weight.T
    for device in ("cpu", "reference"):
        with rlx.compile(graph, bind={"SEQ": 1, "w": weight}, cache=cache, device=device) as exe:
            np.testing.assert_allclose(exe(x=x)["y"], wanted, atol=1e-5)
            assert ("each worker computes it" in str(exe.explain())) == (device == "cpu")


# -- without a kernel --------------------------------------------------------------------------------------------------


def test_an_op_of_elements_joins_a_chain(cache: CompileCache) -> None:
    square, swish = define(own.relu2), define(own.swish)
    graph = graph_of(lambda x: ops.tanh(swish(square(x) + 1.0, beta=0.5)))
    x = array(3, 20)
    inner = np.maximum(x, 0) ** 2 + 1
    with rlx.compile(graph, cache=cache) as exe:
        np.testing.assert_allclose(exe(x=x)["y"], np.tanh(inner / (1 + np.exp(-0.5 * inner))), atol=1e-5)
        assert [n.op for n in exe.graph.nodes()] == ["input", "elementwise"]
        done = {event.rule for part in exe.explain().passes for event in part.done}
        assert "meaning" in done and "of relu2, in ops that have kernels" in str(exe.explain())


def test_a_meaning_with_a_mean_is_traced(cache: CompileCache) -> None:
    op = define(own.centred)
    graph = Graph("centred")
    graph.output("y", op(graph.input("x", [SEQ, 20]), graph.weight("shift", [20])))
    x, shift = array(3, 20), array(20)
    with rlx.compile(graph, bind={"shift": shift}, cache=cache) as exe:
        np.testing.assert_allclose(exe(x=x)["y"], (x - x.mean(1, keepdims=True)) / 2 + shift, atol=1e-5)


# -- the compile cache -------------------------------------------------------------------------------------------------

SOURCE = """
import rlx
FACTOR = 2.0

def helper(v):
    return v * FACTOR

def kernel(x, out, begin, end, n):
    for i in range(begin * n, end * n):
        out[i] = helper(x[i])

@rlx.custom_op(shape="x[..., n] -> [..., n]", kernel=kernel, redefine=True)
def doubled(x):
    return helper(x)
"""


def test_a_change_of_the_source_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel, of a function that it calls, and of a number that this one reads."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python tells sources apart by size and second
    file, x = tmp_path / "doubled_op.py", array(2, 20)

    def run(source: str) -> tuple[bool, np.ndarray]:
        file.write_text(source)
        module = load(file)
        with rlx.compile(graph_of(module.doubled), cache=CompileCache(store=Store(tmp_path / "cache"))) as exe:
            return exe.stats["cached"], exe(x=x)["y"]

    assert [run(SOURCE)[0], run(SOURCE)[0]] == [False, True]
    for old, new, factor in (("FACTOR = 2.0", "FACTOR = 4.0", 4), ("v * FACTOR", "FACTOR * v + v", 3)):
        cached, y = run(SOURCE.replace(old, new))
        assert not cached and np.array_equal(y, factor * x)
    assert run(SOURCE)[0], "the first definition is still there"
    cached, y = run(SOURCE.replace("range(begin * n", "range(n * begin"))
    assert not cached and np.array_equal(y, 2 * x)


def test_other_graphs_keep_their_keys(cache: CompileCache) -> None:
    from rlx.compiler.compile import Compiler
    from rlx.passes.options import Options

    compiler = Compiler(cache=cache)
    plain = graph_of(ops.tanh)
    before = compiler.program_key(plain, Options())
    example = load(ROOT / "examples" / "custom_op.py")
    assert compiler.program_key(plain, Options()) == before
    touched = compiler.program_key(example.graph(8), Options())
    assert touched.options["custom_ops"] == {"cosine": example.cosine.digest}


# -- registration ------------------------------------------------------------------------------------------------------


def test_the_same_definition_gives_the_same_op() -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(scaled())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    with pytest.raises(
        CustomOpError, match=r"custom op scaled: another definition has this name, in own_ops\. .*redefine"
    ):
        scaled(tolerance=1e-2)
    old, new = found[0], scaled(tolerance=1e-2, redefine=True)
    with pytest.raises(CustomOpError, match="defined anew"):
        old(Graph().input("x", [SEQ, 4]))
    assert new(Graph().input("x", [SEQ, 4])).op == "scaled"


def closure() -> Callable[..., None]:
    factor = 2.0

    def kernel(x: Any, out: Any, begin: int, end: int, n: int) -> None:
        for i in range(begin * n, end * n):
            out[i] = x[i] * factor

    return kernel


def from_exec() -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec("def made(x):\n    return x", names)
    made: Callable[..., Any] = names["made"]
    return made


@pytest.mark.parametrize(
    ("meaning", "options", "message"),
    [
        (own.scaled, {"name": "silu"}, "custom op silu: an op of rlx has this name"),
        (own.scaled, {"name": "a b"}, "'a b' is no name of an op"),
        (np.tanh, {}, "meaning is a ufunc, expected a function"),
        (from_exec(), {}, "meaning of made: the source of made cannot be read. Define it with `def`"),
        (own.counts_calls, {}, "meaning of counts_calls: counts_calls has a side effect: .* global variable calls"),
        (own.reads_list, {}, "reads the variable TABLE, a list, which can change: a side effect"),
        (own.reads_list_in_helper, {}, "reads the variable TABLE, a list"),
        (own.variadic, {}, r"the meaning has the parameter \*x"),
        (own.optional, {}, "has the parameter y"),
        (own.scaled, {"shape": "x[n]"}, "'x.n.' has no result"),
        (own.scaled, {"shape": "x[..., n] -> [..., m]"}, "the result has m, which no operand has"),
        (own.scaled, {"shape": "y[..., n] -> [..., n]"}, "has the operands y, the meaning takes x"),
        (own.scaled, {"shape": "x[n/2] -> [n]"}, "'n/2' is no axis"),
        (own.scaled, {"shape": "x f16[n] -> [n]"}, "'f16' is no type"),
        (own.scaled, {"kernel": own.scaled_kernel}, "a kernel needs a shape rule"),
        (own.scaled, {"shape": RULE, "kernel": own.wrong_parameters}, r"takes \(x, out, start, end\), expected"),
        (own.scaled, {"shape": RULE, "kernel": own.unknown_size}, "Behind `end` it may take by, n"),
        (own.scaled, {"shape": RULE, "kernel": closure()}, "the kernel uses factor of an enclosing function"),
        (own.scaled, {"shape": RULE, "fuses": own.scaled_formula}, "fuses needs a kernel"),
        (own.scaled, {"shape": RULE, "tolerance": 2.0}, "tolerance is 2.0"),
    ],
)  # fmt: skip
def test_wrong_definitions_are_refused(meaning: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CustomOpError, match=message):
        define(meaning, **options)
    assert not custom.custom_ops()


# -- trials ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meaning", "shape", "message"),
    [
        (own.one_column, RULE, r"its shape rule gives f32\[3, 20\], its meaning float64\[3, 1\]"),
        (own.scaled, "x[..., n] -> i32[..., n]", r"its shape rule gives i32\[3, 20\], its meaning float64"),
        (own.writes_operand, RULE, "its meaning raised ValueError: .*read-only.* must not write its operands"),
        (own.random_numbers, RULE, "a side effect: its meaning gives two results"),
        (own.sums_rows, RULE, "its meaning mixes rows"),
        (own.raises, RULE, "its meaning raised "),
        (own.text_result, RULE, "its meaning returns <U4, no numbers"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_wrong_meanings_are_refused(meaning: Any, shape: str, message: str, device: str, cache: CompileCache) -> None:
    op = define(meaning, shape=shape)
    with pytest.raises(CustomOpError, match=f"custom op {op.name}: {message}"):
        rlx.compile(graph_of(op), cache=cache, device=device)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (own.too_far, r"it (reads x|writes out)\[60\], and (x|out) has 60 elements"),
        (own.negative_index, r"it reads x\[-1\]"),
        (own.into_operand, r"a side effect: it writes x\[0\], an operand"),
        (own.other_value, r"it computes .* at \[\d, \d+\], the meaning .*differ by more than the tolerance, 5e-05"),
        (own.by_range, "its result depends on how units are divided"),
        (own.half_written, r"it leaves 30 of 60 elements of the result unwritten, first out\[10\]"),
        (own.in_double, r"it computes in float64. Write f32\(n\)"),
        (own.uses_list, "Numba cannot compile it"),
        (own.uses_numpy, r"Numba cannot compile it: .*numpy\.exp.*line \d+: out\[i\] = np\.exp.*A kernel may use"),
    ],
)
def test_wrong_kernels_are_refused(kernel: Any, message: str, cache: CompileCache) -> None:
    op = scaled(kernel)
    with pytest.raises(CustomOpError, match=f"(?s)custom op scaled, kernel: {message}"):
        rlx.compile(graph_of(op), cache=cache)


def test_verification_follows_every_step(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    op = scaled()
    monkeypatch.setenv("RLX_VERIFY", "1")
    with rlx.compile(graph_of(op), cache=cache) as exe:
        exe(x=array(2, 20))
        monkeypatch.setattr(op, "meaning", own.relu2)
        monkeypatch.setattr(op, "evaluate", lambda x, attrs, env: x[0] * 3)
        op_table.OPS["scaled"] = op.row()
        with pytest.raises(VerificationError, match=r"scaled, kernel scaled_.*Its kernel is wrong"):
            exe(x=array(2, 20))


# -- a family ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rewritten_family_against_transformers(goldens: Path) -> None:
    """Qwen 3.5 has the formula of the example in its recurrent layers; the logits are those of the fixture."""
    load(ROOT / "examples" / "custom_op.py")
    golden = np.load(goldens / "qwen35" / "golden.npz")
    with rlx.auto_runner(goldens / "qwen35" / "model-f16.gguf", precision="exact", max_seq=128) as runner:
        logits = runner.predict_logits(golden["tokens"].tolist(), all_positions=True)[golden["positions"]]
        assert all(any(kernel.startswith("gated_norm_") for kernel in program.kernels) for program in runner.programs)
    assert np.abs(logits - golden["logits"]).max() < 2e-5 * np.abs(golden["logits"]).max()
