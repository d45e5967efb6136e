"""`rlx cache`: look into the compile cache on disk, see why something was compiled again, clean up."""

from __future__ import annotations

import json
import sys
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import click

from rlx import compiler, env, ir
from rlx.cli.command import Group, confirm_removal
from rlx.cli.output import ago, counted, printable, size, table
from rlx.errors import CacheError, RlxError
from rlx.store.entry import Entry, Listing
from rlx.store.key import ABSENT, CompileKey, range_text
from rlx.store.key import diff as differences
from rlx.store.misses import differing, fields
from rlx.store.store import Store, default_root, may_go

_SHOWN = 12  # digits of a digest that tell entries apart
_GRAPH = "ir/00-graph.txt"  # a program before the passes, in every entry of one

# The columns of `ls`. Of an entry that is no program "phase" says what it is.
_HEADS = ("digest", "phase", "SEQ", "PAST", "batch", "precision", "kv", "model", "level", "size", "age")
_RIGHT = ("size", "age")
_IN_EFFECT = """\
"profile" is what is in effect for this program: without tiles of bf16 every program is deterministic, asked for or not.
"""
_SAID = ("phase", "SEQ", "precision", "model", "level")  # of a removed entry


@click.group(cls=Group)
def cache() -> None:
    """Look into the compile cache, and clean it up.

    The cache is a folder of compiled programs, $RLX_CACHE_DIR or the user's cache folder. An entry is named by its
    digest, or by the first digits that no other entry has.
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with the full keys.")
def ls(as_json: bool) -> None:
    """List the entries, the most recently used first.

    Of a program: what it does (greedy and verify give tokens, the others logits), how many new tokens a call takes
    (SEQ), how many tokens may be before them (PAST), sequences side by side (batch), precision, type of the KV cache,
    model and number of weights, level of the target, size, time since its last use. In a narrow terminal an entry
    takes several lines. Of states of a prompt, PAST is their positions.
    """
    rows = _store().entries()
    if as_json:
        click.echo(json.dumps([_as_dict(row) for row in rows], indent=1))
        return
    columns = [name for name in _HEADS if any(_facts(row)[name] for row in rows)]
    if rows:
        table(columns, [[_facts(row)[name] for name in columns] for row in rows], right=_RIGHT)
    click.echo(f"{counted(len(rows), 'entry')}, {size(sum(row.nbytes for row in rows))}")


@cache.command()
@click.argument("digest")
@click.option("--file", "name", metavar="NAME", help="Print this file of the entry.")
@click.option(
    "-o", "--out", metavar="PATH", type=click.Path(dir_okay=False), help="Write the file to PATH, byte for byte."
)
def inspect(digest: str, name: str | None, out: str | None) -> None:
    """Show what an entry was compiled for, and its files.

    A terminal shows an object file (k.o) as assembly; a pipe and --out get its bytes.
    """
    entry = _store().open(digest)
    if name is None and out is not None:
        raise click.UsageError("--out needs --file NAME, the file to write.")
    if name is not None:
        _show_file(entry, name, out)
        return
    click.echo(printable(f"{entry.key}\n"))
    if entry.key.kind == "program":
        click.echo(_IN_EFFECT)
    sizes = [(name, len(entry.read(name))) for name in entry.names]
    sizes += [(name, row["nbytes"]) for name, row in entry.large.items()]
    table(("file", "size"), ((name, size(nbytes)) for name, nbytes in sizes), right=("size",))
    click.echo(printable(f"in {entry.folder}"))


@cache.command()
@click.argument("a")
@click.argument("b")
def diff(a: str, b: str) -> None:
    """Show in which fields two entries differ.

    That is why the second was compiled. The user's choices stand first, what follows from them last; of two programs
    it also shows how their graphs differ: outputs, shapes, dtypes, counts of ops, and the first values that differ.
    """
    store = _store()
    left, right = store.open(a), store.open(b)
    if left.key == right.key:
        click.echo("the keys are equal")
        return
    heads = ("field", left.key.digest[:_SHOWN], right.key.digest[:_SHOWN])
    table(heads, [*_key_rows(left.key, right.key), *_graph_rows(left, right)])


def _key_rows(a: CompileKey, b: CompileKey) -> list[tuple[str, str, str]]:
    """The fields of the keys that differ, in the user's words; then those that only follow from others."""
    left, right = fields(a), fields(b)
    names = [name for name in differing(left, right) if name not in ("graph", "states")]
    rows = [(name, *_apart(left.get(name, ABSENT), right.get(name, ABSENT))) for name in names]
    if a.kind != b.kind:
        rows.insert(0, ("kind", a.kind, b.kind))
    paths = [path for path in ("profile.bf16_dots", "profile.bf16_tiles") if path.rpartition(".")[2] not in names]
    for path, x, y in differences(a, b):
        if path in paths or (path.startswith("states") and a.graph == b.graph):  # else the graphs say it
            rows.append((path, *_apart(x, y)))
    return rows


def _graph_rows(a: Entry, b: Entry) -> list[tuple[str, str, str]]:
    """How the graphs of two programs differ, by the text that is stored with them."""
    if a.key.graph == b.key.graph:
        return []
    try:
        graphs = [ir.text.loads(entry.read(_GRAPH).decode()) for entry in (a, b)]
    except (RlxError, UnicodeDecodeError) as error:  # of another version, or an entry that no model made
        return [("graph", f"another one; its text cannot be compared: {error}", "")]
    return [(f"graph: {row.what}", row.left, row.right) for row in ir.compare.differences(*graphs)]


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; sizes in bytes.")
def stats(as_json: bool) -> None:
    """Show the folder, its size and its limit."""
    store = _store()
    found, kinds = store.stats(), Counter(_kind(row) for row in store.entries())
    facts = {"folder": str(found.root), "policy": env.cache_policy(), "entries": found.entries}
    if as_json:
        sizes = {"nbytes": found.nbytes, "limit": found.limit, "oldest_use": found.oldest}
        click.echo(json.dumps({**facts, "kinds": dict(sorted(kinds.items())), **sizes}))
        return
    lines = {
        **facts,
        "entries": ", ".join([str(found.entries), *(f"{kind}: {count}" for kind, count in sorted(kinds.items()))]),
        "size": f"{size(found.nbytes)} of {size(found.limit)}",
        "least recently used": "never" if found.oldest is None else f"{ago(found.oldest)} ago",
    }
    for name, value in lines.items():
        click.echo(printable(f"{name + ':':22}{value}"))


@cache.command()
@click.argument("digests", nargs=-1, metavar="[DIGEST]...")
@click.option("--all", "everything", is_flag=True, help="Remove all entries.")
@click.option("--yes", is_flag=True, help="With --all: do not ask.")
def prune(digests: tuple[str, ...], everything: bool, yes: bool) -> None:
    """Remove entries.

    --all asks first in a terminal, and needs --yes elsewhere. It leaves what `rlx tune` measured.
    """
    if everything == bool(digests):
        raise click.UsageError("Name the entries to remove, or say --all.")
    if yes and not everything:
        raise click.UsageError("--yes goes with --all; named entries are removed without a question.")
    store = _store()
    if everything:
        going = [row for row in store.entries() if may_go(row.key)]
        if going and not yes:
            what = f"{counted(len(going), 'entry')} of {size(sum(row.nbytes for row in going))} in {store.root}"
            confirm_removal("prune --all", what, " They are compiled again when they are needed")
        click.echo(f"removed {counted(store.clear(), 'entry')}")
        return
    found = {row.digest: row for row in map(store.find, digests)}  # all or none: a mistyped one removes nothing
    for row in found.values():
        store.remove(row.digest)
        facts = _facts(row)
        click.echo(printable(f"removed {' '.join(filter(None, (facts[name] for name in ('digest', *_SAID))))}"))


@cache.command()
@click.option("--keep", is_flag=True, help="Only report damaged entries.")
@click.pass_context
def verify(ctx: click.Context, keep: bool) -> None:
    """Check every file of every entry, and remove the damaged.

    Exits with 1 if an entry was damaged.
    """
    store = _store()
    total = len(store.entries())
    wrong = store.verify(discard=not keep)
    if not wrong:
        click.echo(f"{counted(total, 'entry')}, all as they were written")
        return
    table(("digest", "damage"), ((digest[:_SHOWN], what) for digest, what in wrong))
    click.echo(f"{counted(len(wrong), 'entry')} of {total} damaged" + ("" if keep else " and removed"))
    ctx.exit(1)


for _earlier, _command in {"show": inspect, "rm": prune}.items():  # their names in earlier versions
    cache.add_command(copy(_command), _earlier)
    cache.commands[_earlier].hidden = True


def _store() -> Store:
    """The store in its usual place. Naming the folder makes a bad one an error: here somebody asks for it."""
    return Store(default_root())


def _as_dict(row: Listing) -> dict[str, Any]:
    return {**vars(row), "folder": str(row.folder), "key": row.key.as_dict() if row.key else None}


def _facts(row: Listing) -> dict[str, str]:
    """The cells of an entry by column; "" where it has no such thing."""
    cells = dict.fromkeys(_HEADS, "")
    if row.key is None:
        cells["phase"] = "?"
    else:
        found = fields(row.key)
        program = row.key.kind == "program"
        cells["phase"] = found["phase"] if program else row.key.kind
        cells["model"] = row.key.name
        cells["level"] = str(found["target level"] or "")
        cells["PAST"] = range_text(row.key.options.get("positions"))
        if program:
            cells |= {name: str(found[name] or "") for name in ("SEQ", "PAST", "batch", "precision")}
            cells["kv"] = found["KV cache type"]
            cells["PAST"] = "" if found["PAST"] == "any" else found["PAST"]
    return cells | {"digest": row.digest[:_SHOWN], "size": size(row.nbytes), "age": ago(row.last_used)}


def _kind(row: Listing) -> str:
    return row.key.kind if row.key else "?"


def _apart(a: Any, b: Any) -> tuple[str, str]:
    """Both values as text; of two long lists of words, such as processor features, only the words that differ."""
    if isinstance(a, str) and isinstance(b, str) and a.count(",") > 3 and b.count(",") > 3:
        left, right = a.split(","), b.split(",")
        only = [w for w in left if w not in right], [w for w in right if w not in left]
        if only[0] or only[1]:
            return ", ".join(only[0]), ", ".join(only[1])
    return _text(a), _text(b)


def _text(value: Any) -> str:
    if value is ABSENT or isinstance(value, str):
        return str(value)
    return json.dumps(value, default=list)


def _show_file(entry: Entry, name: str, out: str | None) -> None:
    data = entry.read(name)
    if out is not None:
        Path(out).write_bytes(data)
        return
    if not sys.stdout.isatty():
        sys.stdout.buffer.write(data)
        return
    if name.endswith(".o") and f"{name.removesuffix('.o')}.ll" in entry.names:
        data = compiler.inspection.disassembly(entry, name).encode()
    try:
        click.echo(printable(data.decode()), nl=not data.endswith(b"\n"))
    except UnicodeDecodeError as error:
        hint = f"Write it to a file: rlx cache inspect {entry.key.digest[:_SHOWN]} --file {name} --out PATH"
        raise CacheError(f"{name} is no text", hint=hint) from error
