"""`rlx cache`: what is listed is what is stored, mistakes end with exit code 2 and one message."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rlx.cli import command
from rlx.cli.main import cli
from rlx.engine.kv.prefix_store import PrefixStore
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
    assert "no file is called 'programm.o'. Did you mean 'program.o'?" in inspected("programm.o")
    listing = f"no file is called 'x'. `rlx cache inspect {PREFILL.digest[:12]}` lists the files."
    assert listing in inspected("x")


def inspected(name: str) -> str:
    return refused("inspect", PREFILL.digest, "--file", name)


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


def test_rm_all_asks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "say --yes" in refused("prune", "--all")  # no terminal: nothing is removed without a word
    monkeypatch.setattr(command, "is_terminal", lambda stream: True)
    for answer, code, left in (("n\n", 1, 3), ("", 1, 3), ("y\n", 0, 0)):
        result = CliRunner().invoke(cli, ["cache", "prune", "--all"], input=answer)
        assert f"Remove 3 entries of {store.stats().nbytes / 1000:.3g} kB in {store.root}" in result.output or not left
        assert (result.exit_code, len(store.entries())) == (code, left)


def test_rm_refuses(store: Store) -> None:
    for args in ([], ["--all", DECODE.digest], ["--yes", DECODE.digest], ["--all"]):
        assert "--all" in refused("prune", *args)
    assert "no entry starts with 'ffff0'" in refused("prune", DECODE.digest, "ffff0")
    assert len(store.entries()) == 3
