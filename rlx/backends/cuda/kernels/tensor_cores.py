"""Tensor cores: copies to shared memory, operands from there, products by a warp or by four."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.code import F32, I32, I64, WARPS, Code, Value
from rlx.backends.cuda.numbers import halves

# -- copies to shared memory -------------------------------------------------------------------------------------------


def copy_async(k: Code, target: Value, source: Value, kept: Value | None = None, size: int = 16) -> None:
    """Begins to copy 16 bytes to shared memory, or 8.

    Args:
        kept: how many of them; the others become zeros. Where copies do not run by themselves it is all of them, or 0.
    """
    if not k.features.copies:
        k.store(target, _loaded(k, source, kept, size // 4))
        return
    name = f"llvm.nvvm.cp.async.{'cg' if size == 16 else 'ca'}.shared.global.{size}"
    if kept is None:
        k.call("void", name, target, source)
    else:
        k.call("void", f"{name}.s", target, source, kept)


def _loaded(k: Code, source: Value, kept: Value | None, words: int) -> Value:
    """Some words of memory of the card, or zeros if none is kept: nothing is read then."""
    if kept is None:
        return k.load(source, f"<{words} x i32>")
    each = range(words)
    text = f"@${words + 1} ld.global.v{words}.u32 {{{', '.join(f'${i}' for i in each)}}}, [${words}];"
    constraints = ",".join(["=r"] * words + ["l", "b", *map(str, each)])
    result = f"{{{', '.join([I32] * words)}}}"
    return k.vector(_fields(k, k.assembly(result, text, constraints, source, kept > 0, *[k.number(0)] * words), I32))


def commit_copies(k: Code) -> None:
    """Ends a group of copies."""
    if not k.features.copies:
        return
    k.call("void", "llvm.nvvm.cp.async.commit.group")


def wait_copies(k: Code, left: int) -> None:
    """Waits for the copies of this thread but the last `left` groups. Others see them after a barrier."""
    if not k.features.copies:
        return
    k.call("void", "llvm.nvvm.cp.async.wait.group", k.number(left))


def fence_copies(k: Code) -> None:
    """Makes what this thread copied to shared memory visible to `begin_products`, after a barrier."""
    k.line('call void asm sideeffect "fence.proxy.async.shared::cta;", "~{memory}"() convergent')


# -- warps that wait for each other -----------------------------------------------------------------------------------


def init_barriers(k: Code, count: int) -> Value:
    """Barriers for the warps of a block, in shared memory, 8 bytes each (mbarrier, sm_90); `Code.barrier` must follow.

    A warp arrives at a barrier and goes on; later it waits until all have arrived. They are used again and again.
    """
    barriers = k.share(8 * count)
    with k.when(k.thread.equals(0)):
        for i in range(count):
            k.assembly("void", f"mbarrier.init.shared::cta.b64 [$0], {WARPS};", "l", k.at(barriers, I64, i))
    return barriers


def arrive(k: Code, barrier: Value) -> None:
    """This warp arrives; warps that wait then see what it did before."""
    k.sync_warp()
    with k.when(k.lane.equals(0)):
        k.assembly("void", "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", "l", barrier)


def wait_barrier(k: Code, barrier: Value, parity: Value) -> None:
    """Waits until all warps have arrived at a barrier.

    Args:
        parity: 1 if they had arrived an odd number of times before, else 0.
    """
    text = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [$0], $1;"
    k.assembly("void", f"{{ .reg .pred p; again: {text} @!p bra again; }}", "l,r", barrier, parity)


# -- by a warp ---------------------------------------------------------------------------------------------------------


def matrices(k: Code, place: Value, *, transposed: bool = False) -> list[Value]:
    """Four 8 x 8 matrices of 16-bit numbers from shared memory, a register of each (ldmatrix).

    Args:
        place: lane 8 i + j has the address of row j of matrix i.
        transposed: whether they are transposed.
    """
    name = f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.b16.p3"
    return _fields(k, k.call("{i32, i32, i32, i32}", name, place), I32)


def product(k: Code, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value], kind: str = "bf16") -> list[Value]:
    """c + a b of 16 x 16 and 16 x 8 numbers of f16 or bf16 (mma.sync m16n8k16)."""
    if not k.features.bf16:
        if kind == "f16":
            return _half_product(k, a[2:], b[1:], _half_product(k, a[:2], b[:1], c))
        return _product_of_lanes(k, a, b, c)
    name = f"llvm.nvvm.mma.m16n8k16.row.col.{'bf16' if kind == 'bf16' else 'f32.f32'}"
    given = [*a, *b] if kind == "bf16" else [x.bits("<2 x half>") for x in (*a, *b)]
    return _fields(k, k.call("{float, float, float, float}", name, *given, *c), F32)


# -- without tensor cores for bf16 -------------------------------------------------------------------------------------
#
# Products of bf16 are exact in f32. Lane 4 g + t has four of the 16 k: a sum of 16 products is that of four such sums,
# (0 + 1) + (2 + 3), whoever adds them.


def _half_product(k: Code, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
    """c + a b of 16 x 8 and 8 x 8 numbers of f16 (mma.sync m16n8k8)."""
    given = [each.bits("<2 x half>") for each in (*a, *b)]
    name = "llvm.nvvm.mma.m16n8k8.row.col.f32.f32"
    return _fields(k, k.call("{float, float, float, float}", name, *given, *c), F32)


def _product_of_lanes(k: Code, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
    """The product: each lane gets the numbers of its two rows and two columns from those that have them."""
    rows = [[_of_lanes(k, word, k.lane & -4, "row") for word in a[row::2]] for row in range(2)]
    columns = [[_of_lanes(k, word, ((k.lane & 3) << 3) + 4 * i, f"column {i}") for word in b] for i in range(2)]
    found = list[Value]()
    for i, value in enumerate(c):
        sums = [
            _sum_of_four(k, *(_numbers([word[t] for word in words]) for words in (rows[i // 2], columns[i % 2])))
            for t in range(4)
        ]
        found.append(value + ((sums[0] + sums[1]) + (sums[2] + sums[3])))
    return found


def _of_lanes(k: Code, word: Value, first: Value, name: str) -> list[Value]:
    """What four lanes side by side have of a register; it is moved once for all products of the same operand."""
    return k.once((name, word.text), lambda: [k.shuffled(word, first + t) for t in range(4)])


def _numbers(words: Sequence[Value]) -> list[Value]:
    return [number for word in words for number in halves(word)]


def _sum_of_four(k: Code, a: Sequence[Value], b: Sequence[Value]) -> Value:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = k.fma(x, y, total)
    return total


# -- by four warps -----------------------------------------------------------------------------------------------------


def matrix_descriptor(k: Code, place: Value, stride: int) -> Value:
    """Describes numbers in shared memory to `begin_products`: rows of 128 bytes, 16 bytes c at c xor row % 8.

    Args:
        place: of the first row; eight rows begin at a multiple of 1024.
        stride: bytes from eight rows to the next eight.
    """
    address = k.op(f"ptrtoint {place.type} {place.text} to i32", I32)
    return ((address & 0x3FFFF) >> 4).to(I64) | (1 << 62 | (stride >> 4) << 32 | 1 << 16)


def begin_products(
    k: Code, pairs: Sequence[tuple[Sequence[Value], int]], b: Value, n: int, c: Sequence[Value]
) -> list[Value]:
    """Begins c + a b of 64 x 16 and 16 x n numbers of bf16, summed over pairs (wgmma, sm_90a).

    What it returns may be used after `finish_products` only, but for as the `c` of the next products.

    Args:
        pairs: the registers of a, 16 rows a warp, and how many times 16 bytes its b lies after the place of `b`.
        n: columns: a multiple of 8.
        c: the lane's n / 2 numbers, in fours for eight columns.
    """
    count = n // 2
    sums = ", ".join(f"${i}" for i in range(count))
    lines, given = ["wgmma.fence.sync.aligned;"], list[Value]()
    for a, offset in pairs:
        registers = ", ".join(f"${2 * count + 1 + len(given) + j}" for j in range(4))
        given += a
        lines.append(
            f"{{ .reg .b64 d; add.s64 d, ${2 * count}, {offset}; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, {{{registers}}}, d, 1, 1, 1, 0; }}"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    return _together(k, lines, "=&f", count, c, ["l"] + ["r"] * len(given), [b, *given])


def await_products(k: Code, left: int, read: Sequence[Value]) -> None:
    """Waits for all products but the `left` last ones that were begun: what they read may be changed then.

    At the end of an iteration of a loop none may be left: the driver does not see there that they read registers. That
    it sees this before is not written anywhere. So these registers are used here once more: they would be stored if the
    first extent were negative, which no extent is.

    Args:
        read: registers that the products read that are waited for.
    """
    fours = [", ".join(f"${2 + i + j}" for j in range(4)) for i in range(0, len(read), 4)]
    stores = " ".join(f"@p st.global.v4.b32 [$1], {{{four}}};" for four in fours)
    text = f"wgmma.wait_group.sync.aligned {left}; {{ .reg .pred p; setp.lt.s32 p, $0, 0; {stores} }}"
    given = [k.load(k.extents, I32, constant=True), k.extents, *read]
    operands = ", ".join(f"{each.type} {each.text}" for each in given)
    constraints = ",".join(["r", "l", *["r"] * len(read), "~{memory}"])
    k.line(f'call void asm sideeffect "{text}", "{constraints}"({operands}) convergent')


def finish_products(k: Code, values: Sequence[Value]) -> list[Value]:
    """The results of `begin_products`, when all that were begun are done."""
    return _together(k, ["wgmma.wait_group.sync.aligned 0;"], "=f", len(values), values, [], [])


def _together(
    k: Code, lines: Sequence[str], kind: str, count: int, tied: Sequence[Value], kinds: list[str],
    given: Sequence[Value],
) -> list[Value]:  # fmt: skip
    constraints = [kind] * count + [str(i) for i in range(len(tied))] + kinds + ["~{memory}"]
    result = f"{{{', '.join(['float'] * count)}}}"
    operands = ", ".join(f"{v.type} {v.text}" for v in (*tied, *given))
    text = f'call {result} asm sideeffect "{" ".join(lines)}", "{",".join(constraints)}"({operands}) convergent'
    return _fields(k, k.op(text, result), F32)


def _fields(k: Code, found: Value, type_: str) -> list[Value]:
    count = found.type.count(",") + 1
    return [k.op(f"extractvalue {found.type} {found.text}, {i}", type_) for i in range(count)]
