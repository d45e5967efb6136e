"""`rlx cache`: look into the compile cache on disk, see why something was compiled again, clean up."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.main import debug_option
from rlx.cli.output import counted, printable, size, table
from rlx.errors import CacheError

if TYPE_CHECKING:
    from rlx.runtime.entry import Listing
    from rlx.runtime.store import Store

_SHOWN = 12  # digits of a digest that tell entries apart
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@click.group()
def cache() -> None:
    """Look into the compile cache, and clean it up.

    The cache is a folder of compiled programs, $RLX_CACHE_DIR or the user's cache folder. An entry is named by its
    digest, or by the first digits that no other entry has.
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with the full keys.")
@debug_option
def ls(as_json: bool) -> None:
    """List the entries, the most recently used first."""
    rows = _store().entries()
    if as_json:
        click.echo(json.dumps([_as_dict(row) for row in rows], indent=1))
        return
    heads = ("digest", "kind", "name", "phase", "SEQ", "target", "size", "used")
    table(heads, (_cells(row) for row in rows), right=("size", "used"))
    click.echo(f"{counted(len(rows), 'entry')}, {size(sum(row.nbytes for row in rows))}")


@cache.command()
@click.argument("digest")
@click.option("--file", "name", metavar="NAME", help="Print this file of the entry.")
@debug_option
def show(digest: str, name: str | None) -> None:
    """Show what an entry was compiled for, and its files."""
    entry = _store().open(digest)
    if name is not None:
        _print_file(entry.read(name), name)
        return
    click.echo(printable(f"{entry.key}\n"))
    table(("file", "size"), ((name, size(len(entry.read(name)))) for name in entry.names), right=("size",))
    click.echo(printable(f"in {entry.folder}"))


@cache.command()
@click.argument("a")
@click.argument("b")
@debug_option
def diff(a: str, b: str) -> None:
    """Show in which fields the keys of two entries differ.

    That is why the second was compiled.
    """
    from rlx.runtime.key import diff as differences

    store = _store()
    left, right = store.open(a), store.open(b)
    rows = differences(left.key, right.key)
    if not rows:
        click.echo("the keys are equal")
        return
    heads = ("field", left.key.digest[:_SHOWN], right.key.digest[:_SHOWN])
    table(heads, ((path, *_apart(x, y)) for path, x, y in rows))


@cache.command()
@debug_option
def stats() -> None:
    """Show the folder, its size and its limit."""
    from rlx import env

    store = _store()
    found, rows = store.stats(), store.entries()
    kinds = sorted({_kind(row) for row in rows})
    lines = {
        "folder": str(found.root),
        "policy": env.cache_policy(),
        "entries": ", ".join([str(found.entries), *(f"{kind}: {[*map(_kind, rows)].count(kind)}" for kind in kinds)]),
        "size": f"{size(found.nbytes)} of {size(found.limit)}",
        "least recently used": "never" if found.oldest is None else _ago(found.oldest),
    }
    for name, value in lines.items():
        click.echo(printable(f"{name + ':':22}{value}"))


@cache.command()
@click.argument("digests", nargs=-1, metavar="[DIGEST]...")
@click.option("--all", "everything", is_flag=True, help="Remove all entries.")
@debug_option
def rm(digests: tuple[str, ...], everything: bool) -> None:
    """Remove entries."""
    if everything == bool(digests):
        raise click.UsageError("Name the entries to remove, or say --all.")
    store = _store()
    if everything:
        click.echo(f"removed {counted(store.clear(), 'entry')}")
        return
    found = {row.digest: row for row in map(store.find, digests)}  # all or none: a mistyped one removes nothing
    for row in found.values():
        store.remove(row.digest)
        click.echo(printable(f"removed {' '.join(filter(None, _cells(row)[:4]))}"))


@cache.command()
@click.option("--keep", is_flag=True, help="Only report damaged entries.")
@debug_option
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


def _store() -> Store:
    """The store in its usual place. Naming the folder makes a bad one an error: here somebody asks for it."""
    from rlx.runtime.store import Store, default_root

    return Store(default_root())


def _as_dict(row: Listing) -> dict[str, Any]:
    key = row.key.as_dict() if row.key else None
    return {
        "digest": row.digest,
        "nbytes": row.nbytes,
        "last_used": row.last_used,
        "folder": str(row.folder),
        "key": key,
    }


def _cells(row: Listing) -> tuple[str, ...]:
    key = row.key
    if key is None:
        return (row.digest[:_SHOWN], "?", "", "", "", "", size(row.nbytes), _ago(row.last_used))
    level = str(key.target.get("level", ""))
    what = (key.kind, key.name, key.phase, _bucket(key.bucket), level)
    return (row.digest[:_SHOWN], *what, size(row.nbytes), _ago(row.last_used))


def _kind(row: Listing) -> str:
    return row.key.kind if row.key else "?"


def _bucket(bucket: Any) -> str:
    """(2, 16) -> '2-16', (1, 1) -> '1'."""
    if bucket is None:
        return ""
    ends = list(dict.fromkeys(bucket)) if isinstance(bucket, tuple) else [bucket]
    return "-".join(map(str, ends))


def _ago(when: float) -> str:
    seconds = max(0, int(time.time() - when))
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds // unit} {name} ago"
    return f"{seconds} s ago"


def _apart(a: Any, b: Any) -> tuple[str, str]:
    """Both values as text; of two long lists of words, such as processor features, only the words that differ."""
    if isinstance(a, str) and isinstance(b, str) and a.count(",") > 3 and b.count(",") > 3:
        left, right = a.split(","), b.split(",")
        only = [w for w in left if w not in right], [w for w in right if w not in left]
        if only[0] or only[1]:
            return ", ".join(only[0]), ", ".join(only[1])
    return _text(a), _text(b)


def _text(value: Any) -> str:
    from rlx.runtime.key import ABSENT

    return str(value) if value is ABSENT else json.dumps(value)


def _print_file(data: bytes, name: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.buffer.write(data)
        return
    try:
        click.echo(printable(data.decode()), nl=not data.endswith(b"\n"))
    except UnicodeDecodeError as error:
        hint = f"Send it to a file: rlx cache show ... --file {name} > {name.rsplit('/')[-1]}"
        raise CacheError(f"{name} is no text", hint=hint) from error
