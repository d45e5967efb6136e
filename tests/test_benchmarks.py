"""The benchmark scripts: arguments, statistics, tables, the page they write, the line protocol between processes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rlx

FOLDER = Path(__file__).parent.parent / "benchmarks"

PEER = """
import ctypes, time
from types import SimpleNamespace
__version__ = "0"
llama_token, vocab, counted = ctypes.c_int32, {vocab}, [0]
def say(text):
    with open({log!r}, "a") as file:
        file.write(text + "\\n")
def nothing(*_):
    return 0
llama_log_set = llama_backend_init = llama_synchronize = llama_memory_clear = llama_free = nothing
llama_model_is_hybrid = llama_model_is_recurrent = llama_get_memory = llama_model_get_vocab = nothing
llama_log_callback = lambda function: function
llama_model_default_params = llama_context_default_params = SimpleNamespace
llama_model_load_from_file = lambda path, params: 1
llama_vocab_n_tokens = lambda v: vocab
llama_model_n_ctx_train = lambda model: 1024
llama_print_system_info = lambda: b"x"
llama_memory_seq_rm = lambda *_: True
def llama_init_from_model(model, params):
    say(f"context threads {{params.n_threads}} flash {{params.flash_attn_type}}")
    return 1
def llama_batch_get_one(tokens, n):
    return n
def llama_decode(context, n):
    time.sleep(1e-4)
    counted[0] += n
    return 0
def llama_get_logits_ith(context, at):
    logits = (ctypes.c_float * vocab)()
    logits[counted[0] % vocab] = 1.0
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
class Llama:
    def __init__(self, n_threads, n_threads_batch, **_):
        say(f"Llama threads {{n_threads}}")
    def reset(self):
        pass
    def generate(self, ids, temp):
        while True:
            yield 7
"""


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    found = __import__(name)
    assert isinstance(found, ModuleType)
    return found


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("report", monkeypatch)


@pytest.fixture
def versus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("versus", monkeypatch)


@pytest.fixture
def side() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(FOLDER / "rlx_side.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child


# -- statistics -----------------------------------------------------------------------------------------------------


def test_ratios_of_medians_and_of_pairs_are_different_things(report: ModuleType) -> None:
    ours, theirs = report.Series(512, [1.0, 2.0, 4.0]), report.Series(512, [3.0, 4.0, 4.0])
    assert ours.rate == 256 and ours.spread == (128, 512)
    assert report.ratio(ours, theirs) == 2.0
    assert report.paired_ratio(ours, theirs) == 2.0
    slow_machine = report.Series(512, [3.0, 2.0, 8.0])  # of the pairs 1/1, 1/2 and 2/1
    assert report.ratio(slow_machine, theirs) == 4 / 3
    assert report.paired_ratio(slow_machine, theirs) == 1.0


# -- tables ---------------------------------------------------------------------------------------------------------


def test_the_table_of_speeds(report: ModuleType) -> None:
    sides = {"rlx": report.Series(512, [1.0, 1.0, 1.6]), "llama.cpp": report.Series(512, [2.0, 2.0, 2.0])}
    row = report.Measurement("prefill 512", sides, work=1e11, limit=(400.0, "GFLOP/s"))
    head, rule, line = report.speed_table([row]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["prefill 512", "512 (320-512)", "25% of 400 GFLOP/s", "256 (256-256)", "**2.00**"]
    assert head.count("|") == rule.count("|") == line.count("|")


def test_a_section_of_the_page_is_replaced_and_the_others_stay(report: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "measurements.md"
    report.write(page, "a", "first")
    report.write(page, "b", "second")
    report.write(page, "a", "third")
    text = page.read_text()
    assert text.startswith("# Measurements") and "first" not in text
    assert 0 < text.index("third") < text.index("second")
    assert text.count("<!-- begin a -->") == text.count("<!-- end a -->") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["measurements.md"]


# -- versus.py ------------------------------------------------------------------------------------------------------


def test_answers_of_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = module("drive", monkeypatch)
    assert drive.checked("x", "prefill", '{"seconds": 1.5}', io.BytesIO()) == {"seconds": 1.5}
    with pytest.raises(drive.MissingSide, match="no llama"):
        drive.checked("x", "open", '{"error": "no llama", "missing": true}', io.BytesIO())
    with pytest.raises(drive.SideError, match="killed by"):
        drive.checked("x", "prefill", "", io.BytesIO(b"killed by the system"))
    with pytest.raises(drive.MissingSide, match="numpy"):
        drive.checked("x", "open", "", io.BytesIO(b"Traceback\nModuleNotFoundError: No module named 'numpy'\n"))


@pytest.mark.slow
def test_a_whole_run_beside_a_peer(
    versus: ModuleType, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for llama_cpp that has its functions, counts instead of computing, and says how it was used."""
    (tmp_path / "llama_cpp.py").write_text(PEER.format(vocab=2048, log=str(tmp_path / "log")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(rlx.__file__).parent.parent)]))
    told, page = tmp_path / "all.json", tmp_path / "page.md"
    flags = ["--only", "prefill,decode,busy,demo", "--quick", "--repeat", "1", "--prefill", "4", "--decode", "0,16"]
    more = ["--tokens", "2", "--threads", "1", "--json", str(told), "--write", str(page)]
    monkeypatch.setattr(sys, "argv", ["versus.py", str(demo_model), *flags, *more])
    monkeypatch.setattr(versus, "DEMO_TOKENS", 4)
    assert versus.main() == 0
    (found,) = json.loads(told.read_text())["models"]
    assert [row["name"] for row in found["measurements"]] == ["prefill 4", "decode at 0", "decode at 16"]
    for row in found["measurements"]:
        assert row["sides"].keys() == {"rlx", "llama.cpp"} and row["limit"]["rate"] > 0
        assert all(len(side["seconds"]) == 1 and side["giga_per_s"] > 0 for side in row["sides"].values())
    assert found["busy"]["beside"].keys() == {"rlx", "llama.cpp"} and "starts" not in found
    assert "llama.cpp: the same for 0, then another" in found["greedy"]
    used = set((tmp_path / "log").read_text().splitlines())
    assert used == {"context threads 1 flash 1", "context threads 1 flash 0", "Llama threads 1"}
    text = page.read_text()
    assert "| decode at 16 |" in text and "| kept | **" in text and "| 4 greedy tokens |" in text


# -- the sides ------------------------------------------------------------------------------------------------------


def ask(side: subprocess.Popen[str], do: str, **arguments: object) -> dict[str, object]:
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
    side.stdin.flush()
    found: dict[str, object] = json.loads(side.stdout.readline())
    return found


def test_a_side_answers_line_by_line(side: subprocess.Popen[str], demo_model: Path) -> None:
    from rlx.engine.engine import Engine
    from rlx.engine.programs.reporting import step_bytes

    engine = Engine.open(demo_model, threads=1, max_seq=128)
    ids, expected = engine.tokenizer.encode("The fox"), []
    sequence = engine.open_sequence()
    logits = engine.append(sequence, ids)
    for _ in range(6):
        expected.append(int(logits.argmax()))
        logits = engine.append(sequence, expected[-1:])
    moved = step_bytes(engine, 20)
    vocab = engine.config.vocab_size
    engine.close()
    opened = ask(side, "open", model=str(demo_model), threads=1, context=128)
    assert opened["vocab"] == vocab
    assert ask(side, "encode", text="The fox") == {"ids": ids}
    assert ask(side, "greedy", ids=ids, tokens=6) == {"tokens": expected, "finite": True}
    prefill = ask(side, "prefill", tokens=40)["seconds"]
    assert isinstance(prefill, float) and prefill > 0
    ask(side, "fill", depth=100)
    for _ in range(4):  # 4 x 20 tokens would not fit if the cache were not brought back
        decode = ask(side, "decode", tokens=20)["seconds"]
        assert isinstance(decode, float) and decode > 0
    work = ask(side, "work", prompts=[8, 16], depths=[20], step=8)
    assert work["bytes"] == {"20": moved}
    flops = work["flops"]
    assert isinstance(flops, dict) and 1.9 < flops["16"] / flops["8"] < 2.2  # attention makes it a little more
    unknown = ask(side, "nothing")
    assert "AttributeError" in str(unknown["error"]) and unknown["missing"] is False
    memory = ask(side, "memory")["peak_bytes"]
    assert isinstance(memory, int) and memory > demo_model.stat().st_size


def test_a_side_without_its_package_says_so(demo_model: Path) -> None:
    blocked = "import sys; sys.modules['llama_cpp'] = None; sys.argv = ['x']; import runpy; "
    run = f"sys.path.insert(0, {str(FOLDER)!r}); runpy.run_path({str(FOLDER / 'llama_side.py')!r}, run_name='__main__')"
    request = json.dumps({"do": "open", "model": str(demo_model), "threads": 1, "context": 64})
    done = subprocess.run(
        [sys.executable, "-c", blocked + run], input=request + "\n", capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["missing"] is True and "llama_cpp" in found["error"]


# -- machine.py -----------------------------------------------------------------------------------------------------


def test_the_tables_of_what_is_left_to_the_read_limit(monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> None:
    limit = module("decode_limit", monkeypatch)
    monkeypatch.setattr(limit, "TOKENS", 4)
    step = limit.measure_step(str(demo_model), 1, 1)
    assert step.linears > 0 and step.others > 0 and step.rate == pytest.approx(step.share * step.read)
    assert step.linears + step.others + step.between == pytest.approx(1e3 / step.tokens_per_s)
    text = limit.show([limit.Kernel(2, "q8_0", 30.0, 27.0, 0.9)], [step])
    assert text.splitlines()[1].split() == ["2", "q8_0", "30.0", "27.0", "90%"]
    assert text.splitlines()[-1].split()[-1] == step.model


# -- scaling.py, replicas.py ----------------------------------------------------------------------------------------


def test_the_model_of_a_step_predicts_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = module("scaling", monkeypatch)
    found = [(depth, predicted / measured) for _, _, depth, measured, predicted in scaling.predictions()]
    assert all(abs(ratio - 1) < 0.15 for depth, ratio in found if depth == 80), "those of an idle machine"
    fewer, more = (scaling.QWEN3_30B.weights(rows) for rows in (1, 64))
    assert fewer < more < scaling.QWEN3_30B.dense + scaling.QWEN3_30B.experts


def test_simulated_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request ends, after its first token; a router that knows prefixes finds more of them in caches."""
    replicas, cached = module("replicas", monkeypatch), {}
    machine, model = replicas.ASSUMED["64 cores"], replicas.MODELS["8B"]
    for name, router in replicas.ROUTERS.items():
        requests, rng = replicas.synthetic(100, 3, seed=1), replicas.random.Random(1)
        some = [replicas.Replica(model, machine, capacity=400) for _ in range(8)]
        cached[name] = replicas.simulate(requests, some, router(some, rng))
        assert len(requests) > 100 and all(r.at < r.first < r.end for r in requests)
        assert all(len(each.cache) <= 400 and not each.load for each in some)
    assert 0 < cached["in turn"] < cached["prefix-aware"] < 1


# -- cold_start.py --------------------------------------------------------------------------------------------------


def test_where_the_time_of_a_cold_start_goes() -> None:
    """The functions that it times are there, and each is called."""
    command = [sys.executable, FOLDER / "cold_start.py", "--runs", "1", "--json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout)
    assert 0 < found["loaded"] < found["first_token"]
    unused = {"Numba: types and lowering", "import Numba's front end"}  # with another Numba, templates are lowered
    assert found["phases"].keys() - unused >= {"passes", "write tile kernels", "LLVM: emit", "run the program"}
