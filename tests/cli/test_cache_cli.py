"""`rlx cache`: what is listed is what is stored, mistakes end with exit code 2 and one message."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from rlx.cli import cache as cli_cache
from rlx.cli.main import cli
from rlx.errors import CacheError
from rlx.runtime.key import CompileKey
from rlx.runtime.store import Store

FEATURES = "+avx,+avx2,+f16c,+fma,+movbe"
DECODE = CompileKey(
    "program",
    "tiny",
    "ab" * 32,
    "decode",
    [1, 1],
    {"k": "f16"},
    {"level": "avx2", "features": FEATURES},
    versions={"v": 1},
)
PREFILL = CompileKey(
    "program", "tiny", "ab" * 32, "prefill", [2, 16], {"k": "f16"},
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
    assert rows == [
        ["digest", "kind", "name", "phase", "SEQ", "target", "size", "used"],
        [PACK.digest[:12], "pack", "q8_0", "avx512", sizes[PACK.digest], rows[1][-1]],
        [PREFILL.digest[:12], "program", "tiny", "prefill", "2-16", "avx2", sizes[PREFILL.digest], "2 h ago"],
        [DECODE.digest[:12], "program", "tiny", "decode", "1", "avx2", sizes[DECODE.digest], "3 d ago"],
    ]
    assert rows[1][-1].endswith(" s ago")
    assert rlx("ls").stdout.splitlines()[-1].startswith("3 entries, ")


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


# ---------------------------------------------------------------------------------------------------- show


def test_show_prints_the_key_and_the_files(store: Store) -> None:
    out = rlx("show", PREFILL.digest[:8]).stdout
    for line in str(PREFILL).splitlines():
        assert line in out
    assert '  options["[bold]x"]: null' in out
    assert ["ir/03-fuse.txt", "25 B"] in listed(out)
    assert ["program.o", "6 B"] in listed(out)
    assert str(store.find(PREFILL.digest).folder) in out


@pytest.mark.parametrize("name", FILES)
def test_show_prints_a_file_as_it_is(name: str, store: Store) -> None:
    data = FILES[name]
    assert rlx("show", DECODE.digest, "--file", name).stdout_bytes == (data.encode() if isinstance(data, str) else data)


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_text_without_control_characters(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", Terminal(raw, encoding="utf-8", write_through=True))
    command: Any = cli_cache.show.callback
    with click.Context(cli_cache.show):
        command(DECODE.digest, "ir/03-fuse.txt")
        assert raw.getvalue().decode() == "%1 = add(%0)\n[red]é\\x1b[2J\n"
        with pytest.raises(CacheError, match=r"program\.o is no text.*> program\.o"):
            command(DECODE.digest, "program.o")


def test_show_refuses(store: Store) -> None:
    assert "no file is called 'x'" in refused("show", DECODE.digest, "--file", "x")
    assert "no entry starts with 'ffff0'" in refused("show", "ffff0")
    assert "DIGEST" in refused("show")
    break_file(store, DECODE)
    assert "damaged: wrong checksum of program.o" in refused("show", DECODE.digest)


# ---------------------------------------------------------------------------------------------------- diff


def test_diff_tells_why_it_was_compiled_again(store: Store) -> None:
    rows = listed(rlx("diff", DECODE.digest[:9], PREFILL.digest[:9]).stdout)
    assert [row for row in rows if row and "─" not in row[0]] == [
        ["field", DECODE.digest[:12], PREFILL.digest[:12]],
        ["phase", '"decode"', '"prefill"'],
        ["bucket", "[1, 1]", "[2, 16]"],
        ["target.features", "+avxvnni"],  # of the long list, only what differs
        ["options", "{}", "(absent)"],
        ["versions.v", "1", "2"],
        ['options["[bold]x"]', "(absent)", "null"],
    ]


def test_diff_of_an_entry_with_itself(store: Store) -> None:
    assert rlx("diff", DECODE.digest, DECODE.digest).stdout == "the keys are equal\n"


def test_diff_refuses(store: Store) -> None:
    assert "no entry starts with 'ffff0'" in refused("diff", DECODE.digest, "ffff0")
    break_file(store, DECODE, "key.json")
    assert "key.json cannot be read" in refused("diff", DECODE.digest, PACK.digest)


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        ("x,y", "x,z", ('"x,y"', '"x,z"')),
        ("a,b,c,d,e", "e,d,c,b,a", ('"a,b,c,d,e"', '"e,d,c,b,a"')),
        (None, [1], ("null", "[1]")),
    ],
)
def test_values_side_by_side(a: Any, b: Any, shown: tuple[str, str]) -> None:
    assert cli_cache._apart(a, b) == shown


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


def test_stats_of_an_empty_cache(store: Store) -> None:
    store.clear()
    assert "never" in rlx("stats").stdout


def test_rm_removes_what_it_is_told(store: Store) -> None:
    out = rlx("rm", DECODE.digest[:10], PACK.digest, PACK.digest[:9]).stdout
    assert out.splitlines() == [
        f"removed {DECODE.digest[:12]} program tiny decode",
        f"removed {PACK.digest[:12]} pack q8_0",
    ]
    assert [row.key for row in store.entries()] == [PREFILL]
    assert rlx("rm", "--all").stdout == "removed 1 entry\n"
    assert store.entries() == []


def test_rm_refuses(store: Store) -> None:
    for args in ([], ["--all", DECODE.digest]):
        assert "--all" in refused("rm", *args)
    assert "no entry starts with 'ffff0'" in refused("rm", DECODE.digest, "ffff0")
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


@pytest.mark.parametrize("command", [["ls"], ["stats"], ["verify"], ["rm", "--all"], ["show", "a"], ["diff", "a", "b"]])
def test_a_folder_that_cannot_be_trusted_is_an_error(command: list[str], store: Store) -> None:
    store.root.chmod(0o777)
    assert "other users can write it" in refused(*command)


def test_help_names_the_commands() -> None:
    out = rlx("--help").stdout
    assert all(f"  {name} " in out for name in ("ls", "show", "diff", "stats", "rm", "verify"))


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7199, "1 h ago"), (86400, "1 d ago")]
)
def test_ages(seconds: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    assert cli_cache._ago(1e9 - seconds) == text
