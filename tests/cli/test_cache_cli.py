"""`rlx cache`: what is listed is what is stored, mistakes end with exit code 2 and one message."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from rlx.backends.cpu.llvm import compile_module
from rlx.backends.cpu.target import Target
from rlx.cli import cache as cli_cache
from rlx.cli.main import cli
from rlx.engine.kv.prefix_store import PrefixStore
from rlx.errors import CacheError
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.graph import Graph
from rlx.store.key import CompileKey, digest_text
from rlx.store.store import Store

FEATURES = "+avx,+avx2,+f16c,+fma,+movbe"
DECODE = CompileKey(
    "program",
    "tiny",
    "ab" * 32,
    "decode",
    [1, 1],
    {"k.0": "f16"},
    {"level": "avx2", "features": FEATURES},
    versions={"v": 1},
)
PREFILL = CompileKey(
    "program", "tiny", "ab" * 32, "prefill", [2, 16], {"k.0": "f16"},
    {"level": "avx2", "features": FEATURES + ",+avxvnni"}, options={"[bold]x": None}, versions={"v": 2},
)  # fmt: skip
PACK = CompileKey("pack", "q8_0", target={"level": "avx512"})
KEYS = (DECODE, PREFILL, PACK)
FILES: dict[str, bytes | str] = {"program.o": b"\x7fELF\0\xff", "ir/03-fuse.txt": "%1 = add(%0)\n[red]é\x1b[2J\n"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Three entries, used 3 days, 2 hours and 5 seconds ago."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("RLX_CACHE", "RLX_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    store = Store()
    for key, age in zip(KEYS, (3 * 86400 + 60, 2 * 3600 + 60, 5), strict=True):
        folder = store.put(key, FILES).folder
        assert folder is not None
        os.utime(folder / "last_used", (time.time() - age,) * 2)
    return store


def rlx(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["cache", *args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def refused(*args: str) -> str:
    return rlx(*args, code=2).stderr


def listed(output: str) -> list[list[str]]:
    """The cells of a table's rows."""
    lines = [line.split("  ") for line in output.splitlines()]
    return [[cell.strip() for cell in line if cell.strip()] for line in lines]


def break_file(store: Store, key: CompileKey, name: str = "program.o") -> None:
    (store.find(key.digest).folder / name).write_bytes(b"?")


# ---------------------------------------------------------------------------------------------------- ls


def test_ls_shows_what_is_stored(store: Store) -> None:
    rows = [row for row in listed(rlx("ls").stdout) if len(row) > 4]
    sizes = {row.digest: f"{row.nbytes} B" for row in store.entries()}
    assert (
        rows
        == [
            [
                "digest",
                "phase",
                "SEQ",
                "kv",
                "model",
                "level",
                "size",
                "age",
            ],  # nothing has a past, a batch or a precision
            [PACK.digest[:12], "pack", "q8_0", "avx512", sizes[PACK.digest], rows[1][-1]],
            [PREFILL.digest[:12], "prefill", "2-16", "f16", "tiny", "avx2", sizes[PREFILL.digest], "2 h"],
            [DECODE.digest[:12], "decode", "1", "f16", "tiny", "avx2", sizes[DECODE.digest], "3 d"],
        ]
    )
    assert rows[1][-1].endswith(" s")
    assert rlx("ls").stdout.splitlines()[-1].startswith("3 entries, ")


def program(phase: str, bucket: list[int], **options: Any) -> CompileKey:
    return CompileKey(
        "program", "qwen3 596M", "ab" * 32, phase, bucket, {"k.0": "q8_0", "v.0": "q8_0", "conv.0": "f32"},
        {"level": "avx512"}, {"precision": "auto"}, options,
    )  # fmt: skip


@pytest.fixture
def many(store: Store) -> Store:
    """Programs of every kind."""
    store.clear()
    store.put(program("greedy", [1, 1], symbols=[["PAST_SEQ", [129, 256]]]), FILES)
    store.put(program("batch", [2, 8]), FILES)
    store.put(program("verify", [2, 16]), FILES)
    return store


@pytest.mark.parametrize("columns", [46, 80, 200])
def test_ls_is_readable_at_any_width(columns: int, many: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fact of every entry is there, no line is longer than the terminal is wide, and no word is cut."""
    monkeypatch.setattr(cli_cache, "width", lambda: columns)
    out = rlx("ls").stdout
    assert all(len(line) <= columns for line in out.splitlines())
    for words in (("greedy", "129-256"), ("batch", "2-8"), ("verify", "2-16")):
        digest = next(row.digest for row in many.entries() if row.key and row.key.phase == words[0])
        start = out.index(digest[:8])  # a narrow table has fewer digits
        assert all(word in out[start:] for word in (*words, "auto", "q8_0", "qwen3 596M", "avx512"))
    if columns == 200:
        heads = ["digest", "phase", "SEQ", "PAST", "batch", "precision", "kv", "model", "level", "size", "age"]
        rows = listed(out)
        assert rows[0] == heads
        assert next(row for row in rows if "batch" in row[1:2])[2:8] == [
            "1", "2-8", "auto", "q8_0", "qwen3 596M", "avx512"
        ]  # fmt: skip


def test_ls_as_json(store: Store) -> None:
    rows = json.loads(rlx("ls", "--json").stdout)
    assert [CompileKey(**row["key"]) for row in rows] == [PACK, PREFILL, DECODE]
    assert [row["digest"] for row in rows] == [PACK.digest, PREFILL.digest, DECODE.digest]
    assert [row["nbytes"] for row in rows] == [row.nbytes for row in store.entries()]
    assert all(Path(row["folder"]).is_dir() for row in rows)


def test_ls_of_an_empty_cache(store: Store) -> None:
    store.clear()
    assert rlx("ls").stdout.splitlines()[-1] == "0 entries, 0 B"
    assert json.loads(rlx("ls", "--json").stdout) == []


def test_ls_lists_an_entry_whose_key_is_unreadable(store: Store) -> None:
    break_file(store, DECODE, "key.json")
    assert [DECODE.digest[:12], "?"] in [row[:2] for row in listed(rlx("ls").stdout)]
    assert json.loads(rlx("ls", "--json").stdout)[-1]["key"] is None


def test_a_folder_with_states_of_prompts_is_listed_compared_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    made = PrefixStore(tmp_path, page=64, page_bytes=8, has_states=False)
    made.use(CompileKey("prefix", "llama 2M", target={"level": "avx2"}))
    digests = made.digests(np.arange(300))
    assert made.write_pages(digests, 256, [bytes(8)] * 4) and made.write_pages(digests, 300, [bytes(8)])
    rows = [row for row in listed(rlx("ls").stdout) if row[1:2] == ["prefix"]]
    assert sorted(row[2] for row in rows) == ["0-256", "256-300"] and rows[0][3:5] == ["llama 2M", "avx2"]
    assert "prefix: 2" in rlx("stats").stdout
    assert ["states.bin", "8 B"] in listed(rlx("inspect", digests.address("a", 300)).stdout)
    assert "option positions" in rlx("diff", rows[0][0], rows[1][0]).stdout
    assert "2 entries, all as they were written" in rlx("verify").stdout
    assert "removed 2 entries" in rlx("prune", "--all", "--yes").stdout


# ---------------------------------------------------------------------------------------------------- show


def test_show_prints_the_key_and_the_files(store: Store) -> None:
    out = rlx("inspect", PREFILL.digest[:8]).stdout
    assert "without tiles of bf16 every program is deterministic, asked for or not" in out
    for line in str(PREFILL).splitlines():
        assert line in out
    assert '  options["[bold]x"]: null' in out
    assert ["ir/03-fuse.txt", "25 B"] in listed(out)
    assert ["program.o", "6 B"] in listed(out)
    assert str(store.find(PREFILL.digest).folder) in out


@pytest.mark.parametrize("name", FILES)
def test_show_prints_a_file_as_it_is(name: str, store: Store) -> None:
    data = FILES[name]
    assert rlx("inspect", DECODE.digest, "--file", name).stdout_bytes == (
        data.encode() if isinstance(data, str) else data
    )


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_text_without_control_characters(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", Terminal(raw, encoding="utf-8", write_through=True))
    command: Any = cli_cache.inspect.callback
    with click.Context(cli_cache.inspect):
        command(DECODE.digest, "ir/03-fuse.txt", None)
        assert raw.getvalue().decode() == "%1 = add(%0)\n[red]é\\x1b[2J\n"
        with pytest.raises(CacheError, match=r"program\.o is no text.*--out PATH"):
            command(DECODE.digest, "program.o", None)


MODULE = "define i64 @twice(i64 %a) {\n  %b = shl i64 %a, 1\n  ret i64 %b\n}\n"


@pytest.mark.parametrize("exact", [True, False])
def test_a_terminal_gets_the_assembly_of_an_object(
    store: Store, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.host()
    made = compile_module(MODULE, target)
    code = made.code if exact else made.code + b"more"
    key = CompileKey("pack", "q8_0", target=target.describe())
    store.put(key, {"kernel.o": code, "kernel.ll": made.text})
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", Terminal(raw, encoding="utf-8", write_through=True))
    command: Any = cli_cache.inspect.callback
    with click.Context(cli_cache.inspect):
        command(key.digest, "kernel.o", None)
        shown = raw.getvalue().decode()
        command(key.digest, "kernel.o", str(tmp_path / "k.o"))
    assert "twice:" in shown and "ret" in shown
    assert ("not exactly the stored code" in shown) != exact
    assert (tmp_path / "k.o").read_bytes() == code and raw.getvalue().decode() == shown


def test_show_refuses(store: Store) -> None:
    assert "no file is called 'x'" in refused("inspect", DECODE.digest, "--file", "x")
    assert "no entry starts with 'ffff0'" in refused("inspect", "ffff0")
    assert "DIGEST" in refused("inspect")
    assert "--out needs --file" in refused("inspect", DECODE.digest, "--out", "x")
    break_file(store, DECODE)
    assert "damaged: wrong checksum of program.o" in refused("inspect", DECODE.digest)


# ---------------------------------------------------------------------------------------------------- diff


def test_diff_tells_why_it_was_compiled_again(store: Store) -> None:
    rows = listed(rlx("diff", DECODE.digest[:9], PREFILL.digest[:9]).stdout)
    assert [row for row in rows if row and "─" not in row[0]] == [
        ["field", DECODE.digest[:12], PREFILL.digest[:12]],
        ["phase", "decode", "prefill"],
        ["SEQ", "1", "2-16"],
        ["CPU features", "+avxvnni"],  # of the long list, only what differs
        ["version of v", "1", "2"],
        ["option [bold]x", "(absent)", "null"],
    ]


def test_diff_says_how_the_graphs_differ(store: Store) -> None:
    """Greedy and plain decode programs differed in two digests."""
    x = Graph("tiny").input("x", [SEQ, 32])
    for output, node in (("logits", ops.silu(x)), ("token", ops.pick(ops.silu(x)))):
        graph = Graph("tiny", {output: node})
        phase = {"logits": "decode", "token": "greedy"}[output]
        key = CompileKey("program", "tiny", digest_text(str(graph)), phase, [1, 1])
        store.put(key, {"ir/00-graph.txt": str(graph)})
    digests = {row.key.phase: row.digest for row in store.entries() if row.key and not row.key.target}
    rows = listed(rlx("diff", digests["decode"], digests["greedy"]).stdout)
    assert [row for row in rows if row and "─" not in row[0]][1:] == [
        ["phase", "decode", "greedy"],
        ["graph: output logits", "f32[SEQ, 32]"],
        ["graph: output token", "i32[SEQ]"],
        ["graph: op pick", "1 time"],
        ["graph: value %logits", "silu(%x) : f32[SEQ, 32]"],
        ["graph: value %x.silu", "silu(%x) : f32[SEQ, 32]"],
        ["graph: value %token", "pick(%x.silu) : i32[SEQ]"],
    ]


def test_diff_of_graphs_without_a_text_says_so(store: Store) -> None:
    other = store.put(replace(DECODE, graph="cd" * 32), FILES).key
    assert "its text cannot be compared" in rlx("diff", DECODE.digest, other.digest).stdout


def test_diff_of_an_entry_with_itself(store: Store) -> None:
    assert rlx("diff", DECODE.digest, DECODE.digest).stdout == "the keys are equal\n"


def test_diff_refuses(store: Store) -> None:
    assert "no entry starts with 'ffff0'" in refused("diff", DECODE.digest, "ffff0")
    break_file(store, DECODE, "key.json")
    assert "key.json cannot be read" in refused("diff", DECODE.digest, PACK.digest)


# ---------------------------------------------------------------------------------------------------- stats, rm, verify


def test_stats_tell_the_folder_and_its_size(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_LIMIT", "3M")
    monkeypatch.setenv("RLX_CACHE", "readonly")
    lines = dict(line.split(":", 1) for line in rlx("stats").stdout.splitlines())
    assert {name: value.strip() for name, value in lines.items()} == {
        "folder": str(store.root),
        "policy": "readonly",
        "entries": "3, pack: 1, program: 2",
        "size": f"{store.stats().nbytes / 1000:.3g} kB of 3.15 MB",
        "least recently used": "3 d ago",
    }


def test_stats_as_json(store: Store) -> None:
    assert json.loads(rlx("stats", "--json").stdout) == {
        "folder": str(store.root),
        "policy": "on",
        "entries": 3,
        "kinds": {"pack": 1, "program": 2},
        "nbytes": store.stats().nbytes,
        "limit": 2 << 30,
        "oldest_use": store.stats().oldest,
    }


def test_rm_removes_what_it_is_told(store: Store) -> None:
    out = rlx("prune", DECODE.digest[:10], PACK.digest, PACK.digest[:9]).stdout
    assert out.splitlines() == [
        f"removed {DECODE.digest[:12]} decode 1 tiny avx2",
        f"removed {PACK.digest[:12]} pack q8_0 avx512",
    ]
    assert [row.key for row in store.entries()] == [PREFILL]
    assert rlx("prune", "--all", "--yes").stdout == "removed 1 entry\n"
    assert store.entries() == []
    assert rlx("prune", "--all").stdout == "removed 0 entries\n"  # nothing to ask about


def test_rm_all_asks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "say --yes" in refused("prune", "--all")  # no terminal: nothing is removed without a word
    monkeypatch.setattr(cli_cache, "is_terminal", lambda stream: True)
    for answer, code, left in (("n\n", 1, 3), ("", 1, 3), ("y\n", 0, 0)):
        result = CliRunner().invoke(cli, ["cache", "prune", "--all"], input=answer)
        assert f"Remove 3 entries of {store.stats().nbytes / 1000:.3g} kB in {store.root}" in result.output or not left
        assert (result.exit_code, len(store.entries())) == (code, left)


def test_rm_refuses(store: Store) -> None:
    for args in ([], ["--all", DECODE.digest], ["--yes", DECODE.digest], ["--all"]):
        assert "--all" in refused("prune", *args)
    assert "no entry starts with 'ffff0'" in refused("prune", DECODE.digest, "ffff0")
    assert len(store.entries()) == 3


def test_verify_removes_damage_and_says_so(store: Store) -> None:
    assert rlx("verify").stdout == "3 entries, all as they were written\n"
    break_file(store, DECODE)
    for args, left, last in ((["--keep"], 3, "1 entry of 3 damaged"), ([], 2, "1 entry of 3 damaged and removed")):
        out = rlx("verify", *args, code=1).stdout
        assert [DECODE.digest[:12], "wrong checksum of program.o"] in listed(out)
        assert out.splitlines()[-1] == last
        assert len(store.entries()) == left
    assert rlx("verify").stdout == "2 entries, all as they were written\n"


@pytest.mark.parametrize(
    "command", [["ls"], ["stats"], ["verify"], ["prune", "--all"], ["inspect", "a"], ["diff", "a", "b"]]
)
def test_a_folder_that_cannot_be_trusted_is_an_error(command: list[str], store: Store) -> None:
    store.root.chmod(0o777)
    assert "other users can write it" in refused(*command)
