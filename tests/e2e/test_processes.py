"""Between processes: a second one that compiles nothing, several that compile the same at once, damage, interrupts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.engine.programs.reporting import profile_step, step_bytes
from rlx.errors import CacheError
from rlx.store.cache import CompileCache
from rlx.store.kinds import CacheWarning
from rlx.store.store import Store, default_root

pytestmark = pytest.mark.any_machine

PROMPT = [5]  # a single token needs one program, that of decode
LONG = [(37 * i + 11) % 500 for i in range(32)]
HANGS = 300  # seconds after which a process is taken to hang; it may compile on a busy machine


@pytest.fixture(scope="session")
def model(goldens: Path) -> Path:
    return goldens / "qwen3" / "model-f16.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A compile cache of the test's own."""
    path = tmp_path / "cache"
    path.mkdir(0o700)
    return path


def tokens_of(model: Path, cache: CompileCache) -> tuple[list[int], Any]:
    """Greedy tokens and what the cache counted."""
    with rlx.auto_runner(model, max_seq=64, cache=cache) as runner:
        return runner.generate(PROMPT, 8, stop_at_eog=False), cache.stats


@pytest.fixture(scope="module")
def usual(model: Path) -> list[int]:
    """The tokens that every process must come to; afterwards the run's shared cache has the programs."""
    return tokens_of(model, CompileCache.default())[0]


@pytest.fixture
def filled(folder: Path, model: Path, usual: list[int]) -> Path:
    """A folder with what `usual` needs, copied from the shared cache."""
    source = CompileCache.default()
    with rlx.auto_runner(model, max_seq=64, cache=source) as runner:
        runner.generate(PROMPT, 2, stop_at_eog=False)
    for digest in source.keys():  # noqa: SIM118 - it is no dict
        shutil.copytree(default_root() / digest[:2] / digest, folder / digest[:2] / digest)
    return folder


def python(code: str, folder: Path | None) -> subprocess.Popen[str]:
    """A process that runs `code` with this checkout and the compile cache in `folder`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if folder is not None:
        env["RLX_CACHE_DIR"] = str(folder)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env, text=True, **pipes)


def result(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def nothing_temporary(folder: Path) -> bool:
    return not any((folder / "tmp").iterdir())


# ---------------------------------------------------------------------------------------------------- a second process

SECOND = """
    import json, sys, time
    import llvmlite.binding as llvm

    def forbidden(*args, **options):
        raise AssertionError("LLVM compiles")

    for name in ("parse_assembly", "parse_bitcode", "create_pass_builder", "create_pipeline_tuning_options"):
        assert hasattr(llvm, name)
        setattr(llvm, name, forbidden)
    llvm.TargetMachine.emit_object = llvm.TargetMachine.emit_assembly = forbidden

    import rlx
    from rlx import demo

    started = {started}
    times = []
    with rlx.auto_runner(demo.path()) as runner:
        tokens = runner.generate({prompt}, 4, lambda token: times.append(time.time() - started), stop_at_eog=False)
        stats = runner.stats()["cache"]
    heavy = ("numba", "gguf", "jinja2", "rich", "tokenizers", "transformers", "torch", "rlx.backends.cpu.llvm",
             "rlx.backends.cpu.numba_frontend", "rlx.backends.cpu.kernels.linear.linear")
    print(json.dumps({{
        "tokens": tokens, "first": times[0], "compiles": stats.compiles, "misses": stats.misses,
        "disk": stats.hits_disk, "heavy": [name for name in heavy if name in sys.modules],
    }}))
"""


def test_a_second_process_compiles_nothing(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rlx.auto_runner(demo_model) as runner:
        expected = runner.generate(LONG, 4, lambda token: None, stop_at_eog=False)
    found = result(python(SECOND.format(started=time.time(), prompt=LONG), None))
    with capsys.disabled():
        print(f" [first token of a 32-token prompt {found['first']:.2f} s after the start of the process] ", end="")
    assert found["tokens"] == expected
    assert (found["compiles"], found["misses"]) == (0, 0)
    assert found["disk"] == 5, "decode, prefill, packing, choice and the worker loop"
    assert found["heavy"] == []


# ---------------------------------------------------------------------------------------------------- several at once

# Nobody begins to build the program before all have found it missing.
AT_ONCE = """
    import json, os, time
    from pathlib import Path
    import rlx
    from rlx.store.cache import CompileCache
    from rlx.compiler import build as builder

    meeting, build = Path({meeting!r}), builder.build_program

    def together(*rest):
        (meeting / str(os.getpid())).touch()
        while len(list(meeting.iterdir())) < {count}:
            time.sleep(0.005)
        return build(*rest)

    builder.build_program = together
    with rlx.auto_runner({model!r}, max_seq=64, cache=CompileCache.default()) as runner:
        tokens = runner.generate({prompt}, 8, stop_at_eog=False)
        compiles = runner.stats()["cache"].compiles
    print(json.dumps({{"tokens": tokens, "compiles": compiles}}))
"""


def test_processes_that_compile_the_same_at_once(folder: Path, tmp_path: Path, model: Path, usual: list[int]) -> None:
    meeting, count = tmp_path / "meeting", 2
    meeting.mkdir()
    code = AT_ONCE.format(model=str(model), prompt=PROMPT, meeting=str(meeting), count=count)
    processes = [python(code, folder) for _ in range(count)]
    try:
        found = [result(process) for process in processes]
    finally:
        for process in processes:
            process.kill()  # one that failed leaves the others waiting
    assert [each["tokens"] for each in found] == [usual] * count
    assert all(each["compiles"] >= 1 for each in found), "each built the program"
    store = Store(folder)
    assert len(store.entries()) == 5, "two programs, packing, choice and the worker loop"
    assert store.verify() == []
    assert nothing_temporary(folder)
    assert tokens_of(model, CompileCache(store=store))[1].compiles == 0


# ---------------------------------------------------------------------------------------------------- damage


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


#: Two of those that `tests/runtime/test_store.py` knows.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of program.o": lambda entry: flip(entry / "program.o"),
    "an empty entry": lambda entry: (shutil.rmtree(entry), entry.mkdir()),
}


def entry_of(folder: Path, phase: str) -> Path:
    """The first program of a phase; "decode" gives logits, "greedy" the likeliest token."""
    return min(row.folder for row in Store(folder).entries() if row.key is not None and row.key.phase == phase)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt_with_one_warning(damage: str, filled: Path, model: Path, usual: list[int]) -> None:
    entry = entry_of(filled, "decode")
    whole = {path.relative_to(entry): path.read_bytes() for path in entry.rglob("*") if path.is_file()}
    DAMAGES[damage](entry)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens, stats = tokens_of(model, CompileCache(store=Store(filled)))
    messages = [str(w.message) for w in caught if w.category is CacheWarning]
    assert len(messages) == 1
    assert messages[0].startswith(f"cache entry {entry.name[:12]} is damaged and not used: ")
    assert tokens == usual
    assert (stats.compiles, stats.damaged) == (1, 1)
    assert Store(filled).verify() == []
    rebuilt = {path.relative_to(entry): path.read_bytes() for path in entry.rglob("*") if path.is_file()}
    assert rebuilt.keys() == whole.keys()
    assert rebuilt[Path("manifest.json")] == whole[Path("manifest.json")]
    tokens, stats = tokens_of(model, CompileCache(store=Store(filled)))
    assert (tokens, stats.compiles) == (usual, 0)


# ---------------------------------------------------------------------------------------------------- evicted entries


def test_what_is_in_use_needs_no_entry_any_more(folder: Path, model: Path, usual: list[int]) -> None:
    """A limit of a byte keeps the last entry only; other processes may remove entries at any time as well."""
    store = Store(folder, limit=1)
    with rlx.auto_runner(model, max_seq=64, cache=CompileCache(store=store)) as runner:
        assert runner.generate(PROMPT, 8, stop_at_eog=False) == usual
        assert len(store.entries()) == 1
        store.clear()
        assert profile_step(runner._engine)
        assert step_bytes(runner._engine, 8) > 0
        assert runner.generate(PROMPT, 8, stop_at_eog=False) == usual
    graph = rlx.Graph("tiny")
    graph.output("y", rlx.ops.silu(graph.input("x", [rlx.SEQ, 32])))
    with rlx.compile(graph, cache=CompileCache(store=store)) as exe:
        store.clear()
        assert exe(x=np.zeros((1, 32)))["y"].max() == 0
        assert exe.stats["kernels"] == 1
        with pytest.raises(CacheError, match=r"is gone: .*\. Compile again"):
            exe.source()


def test_a_model_that_was_compiled_ahead_runs_from_a_read_only_cache(folder: Path, model: Path) -> None:
    """`rlx compile --batch 2` leaves nothing to do: programs, the packers of all weights, the worker loop."""
    pair = {"buckets": {"seq": [1, 8]}, "precision": {"deterministic": True}}
    with rlx.auto_runner(model, profile=pair, cache=CompileCache(store=Store(folder)), load=False) as runner:
        records = runner.compile(batch=2)
        assert [record.cached for record in records] == [False] * 4
        assert (records[-1].phase, records[-1].bucket) == ("batch", (2, 8))
        assert runner.stats()["weights_bytes"] == 0, "the weights stay in the file"
    cache = CompileCache(store=Store(folder), policy="readonly")
    with rlx.auto_runner(model, profile=pair, cache=cache) as runner:
        alone = [runner.generate(prompt, 4, stop_at_eog=False) for prompt in ([1, 2, 3], [4])]
        assert [len(tokens) for tokens in alone] == [4, 4]
        from_logits = runner.generate([1, 2, 3], 4, lambda token: None, stop_at_eog=False)
        assert from_logits == alone[0]
        assert runner.generate_batch([[1, 2, 3], [4]], 4, stop_at_eog=False) == alone
    assert cache.stats.compiles == 0
    assert cache.stats.hits_disk == len(Store(folder).entries()) == 7


# ---------------------------------------------------------------------------------------------------- interrupts

# `rlx ...` that says on stderr when it has come to a place.
INTERRUPTED = """
    import sys, time
    sys.argv = ["rlx", *{arguments!r}]

    import {module} as place
    usual = place.{function}

    def slow(*args, **options):
        print("here", file=sys.stderr, flush=True)
        time.sleep({pause})
        return usual(*args, **options)

    place.{function} = slow
    from rlx.cli import main
    main()
"""


def interrupt(
    folder: Path, arguments: list[str], module: str, function: str, pause: float = 0, visits: int = 1
) -> tuple[int, str, str]:
    """Runs `rlx` until it has come to `module.function`, sends SIGINT; (exit code, stdout, stderr without marks)."""
    code = INTERRUPTED.format(arguments=arguments, module=module, function=function, pause=pause)
    process = python(code, folder)
    assert process.stderr is not None
    for _ in range(visits):
        assert process.stderr.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    return process.returncode, out, err.replace("here\n", "")


@pytest.fixture
def usable(folder: Path, model: Path, usual: list[int]) -> Iterator[None]:
    """After the test the cache can be used, whatever happened."""
    yield
    store = Store(folder)
    assert store.verify() == []
    assert tokens_of(model, CompileCache(store=store))[0] == usual
    assert tokens_of(model, CompileCache(store=Store(folder)))[1].compiles == 0
    assert nothing_temporary(folder)


PLACES = {
    "in LLVM": ("rlx.backends.cpu.llvm", "optimize"),
    "in the store": ("rlx.store.entry", "fill"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_compile_leaves_a_usable_cache(place: str, folder: Path, model: Path, usable: None) -> None:
    code, out, err = interrupt(folder, ["compile", str(model)], *PLACES[place])
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert len(Store(folder).entries()) <= 2


def test_an_interrupted_generation_keeps_what_it_said(folder: Path, model: Path, usable: None) -> None:
    arguments = ["run", str(model), "Hi", "--max-tokens", "500", "--cache", "on"]
    code, _, err = interrupt(folder, arguments, "rlx.engine.loop.job", "Job.add", 0.05, visits=4)
    assert code == 130
    assert "Traceback" not in err
    found = re.search(r"answer: (\d+) tokens.*; interrupted; ", err)
    assert found is not None, err
    assert 1 <= int(found[1]) < 500, "three were chosen; a busy machine may not have shown the newest yet"
