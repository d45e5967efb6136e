"""Rounds of drafts against the same rounds in NumPy: tiny models over one-hot tokens, heads that are often right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlx.backends.cpu.launch.drafts import run_rounds
from rlx.backends.cpu.target import Target
from rlx.backends.drafts import Heads, Rounds
from rlx.backends.host import HOST
from rlx.compiler.compile import Compiler
from rlx.compiler.executable import Executable, compile
from rlx.engine.speculation.drafts import Hits
from rlx.ir import ops
from rlx.ir.dims import SEQ
from rlx.ir.dtypes import I32
from rlx.ir.graph import Graph
from rlx.models.variants import advancing, verifying
from rlx.passes.options import Options
from rlx.store.cache import CompileCache

Array = np.ndarray[Any, Any]

SIZE, TAPS, MOST = 16, 3, 4  # tokens, and the width of all there is
LONG = 1e9


def model_graph(recurrent: bool) -> Graph:
    """The next token depends on the last one, or on the last three."""
    graph = Graph("model")
    x = ops.embedding(graph.weight("table", (SIZE, SIZE)), graph.input("tokens", [SEQ], I32))
    if recurrent:
        x = ops.causal_conv(graph.state("rows", (TAPS - 1, SIZE)), x, graph.weight("taps", (SIZE, TAPS)))
    graph.output("hidden", x)
    graph.output("token", ops.pick(ops.linear(x, graph.weight("head", (SIZE, SIZE)))))
    return graph


def head_graph() -> Graph:
    """Guesses from the last token and a little of what the model, or the head before, hands over."""
    graph = Graph("head")
    x = ops.embedding(graph.weight("table", (SIZE, SIZE)), graph.input("tokens", [SEQ], I32))
    x = ops.last_row(x + ops.scale(graph.input("hidden", [SEQ, SIZE]), 0.1))
    graph.output("next_hidden", x)
    graph.output("token", ops.pick(ops.linear(x, graph.weight("head", (SIZE, SIZE)))))
    return graph


@dataclass
class Case:
    """A model and a head as weights, compiled and in NumPy."""

    recurrent: bool
    seed: int
    weights: dict[str, Array] = field(default_factory=dict)
    made: list[Executable] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        taps = np.concatenate([rng.normal(0, 0.3, (SIZE, TAPS - 1)), np.ones((SIZE, 1))], 1)
        head = rng.standard_normal((SIZE, SIZE))
        self.weights = {"table": np.eye(SIZE), "head": head, "taps": taps if self.recurrent else np.zeros((SIZE, 0))}
        self.weights = {name: value.astype(np.float32) for name, value in self.weights.items()}

    def compiled(self, graph: Graph, rows: tuple[int, int], cache: CompileCache) -> Any:
        """A program on one thread, so that programs of different pools may run together."""
        needed = {name: self.weights[name] for name in graph.leaves("weight")}
        self.made.append(compile(graph, {**needed, "SEQ": rows}, threads=1, cache=cache))
        return self.made[-1]._program

    def programs(self, cache: CompileCache) -> tuple[Any, Any, Heads]:
        graph, sides = model_graph(self.recurrent), [HOST.allocate(4 * (TAPS - 1) * SIZE) for _ in range(2)]
        models = []
        for turn in range(2):
            model = self.compiled(verifying(graph) if self.recurrent else graph, (2, 16), cache)
            if self.recurrent:
                options = Options(seq=(1, 16), all_rows=True)
                then = Compiler(Target.host(), cache).program(advancing(graph), options).instance(model.pool)
                then.bind(self.made[-1]._tensors.buffers)
                model.lead(then)
                model.bind({"rows": sides[turn], "rows'": sides[1 - turn]})
                model.then.prepare({"SEQ": 1})
            model.prepare({"SEQ": 2})
            models.append(model)
        one, some = (self.compiled(head_graph(), rows, cache) for rows in ((1, 1), (2, 16)))
        one.prepare({})
        some.prepare({"SEQ": 2})
        self.sides = [side.view(np.float32, (TAPS - 1, SIZE)) for side in sides]
        return models[0], models[1] if self.recurrent else models[0], Heads(one, some, ("next_hidden", "hidden"), SIZE)

    # what the programs compute

    def rows(self, ids: Sequence[int]) -> Array:
        """What the model hands to the head after the last of some tokens, the first of all."""
        x = np.concatenate([np.zeros((TAPS - 1, SIZE)), self.weights["table"][list(ids)]])
        return (x[-TAPS:] * self.weights["taps"].T).sum(0) if self.recurrent else x[-1]

    def next(self, hidden: Array) -> int:
        return int((self.weights["head"] @ hidden).argmax()) if np.isfinite(hidden).all() else -1

    def guesses(self, hidden: Array, token: int, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count and (not found or found[-1] >= 0):
            hidden = self.weights["table"][found[-1] if found else token] + 0.1 * hidden
            found.append(self.next(hidden))
        return [guess for guess in found if guess >= 0]

    def expected(self, ids: list[int], count: int, stops: Sequence[int], rate: float) -> Rounds:
        """The rounds, one choice at a time, after a token and its drafts."""
        text, found, hits, sums, right = ids[:1], list[int](), Hits(rate), [0, 0, 0], 0
        while True:
            drafts, right, over = ids[1:], 0, False
            while not over:
                found.append(self.next(self.rows(text)))
                right, over = right + 1, found[-1] < 0 or found[-1] in stops
                if over or right > len(drafts) or drafts[right - 1] != found[-1]:
                    break
                text.append(found[-1])
            sums = [sums[0] + 1, sums[1] + len(drafts), sums[2] + right - 1]
            for hit in [True] * (right - 1) + [False] * (right <= len(drafts)):
                hits.count(hit)
            left = count - len(found)
            wanted = min(left - 1, max(1, len(hits.acceptance_probs(MOST))))
            guessed = [] if over or left < 2 else self.guesses(self.rows(text), found[-1], wanted)
            if not guessed:
                return Rounds(found, right, sums[0], sums[1], sums[2], hits.rate)
            text.append(found[-1])
            ids = [found[-1], *guessed]


@pytest.fixture(scope="module", params=[False, True], ids=["stateless", "recurrent"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param, seed=7)
    yield made
    for exe in made.made:
        exe.close()


@pytest.fixture(scope="module")
def programs(case: Case, cache: CompileCache) -> tuple[Any, Any, Heads]:
    return case.programs(cache)


def rounds(case: Case, programs: tuple[Any, Any, Heads], ids: list[int], **limits: Any) -> Rounds:
    """Native rounds from the start of a text, and what must be true of them."""
    now, after, heads = programs
    for side in case.sides:
        side[:] = 0
    now.inputs["tokens"][: len(ids)] = ids
    now.prepare({"SEQ": len(ids)})
    options = {"count": 60, "stops": (), "rate": 0.9, **limits}
    found = run_rounds((now, after), heads, most=MOST, seen=0, rows=SIZE, seconds=LONG, **options)
    want = case.expected(ids, options["count"], options["stops"], options["rate"])
    assert found == want
    done = [ids[0], *found.tokens[:-1]]
    hidden = (now, after)[(found.rounds - 1) % 2].output("hidden", SEQ=found.right)
    np.testing.assert_allclose(hidden[-1], case.rows(done), atol=1e-5)
    if case.recurrent:
        before = np.concatenate([np.zeros((TAPS - 1, SIZE)), case.weights["table"][done]])[-(TAPS - 1) :]
        np.testing.assert_array_equal(case.sides[found.rounds % 2], before)
    return found


def test_rounds_are_those_of_numpy(case: Case, programs: tuple[Any, Any, Heads]) -> None:
    """From every token, with any first drafts; some come and some do not, in either turn."""
    sums = np.zeros(3, int)
    for token in range(SIZE):
        for drafts in ([0], [token, 3], [1, 2, 3, 4]):
            for rate in (0.1, 0.9, 1.0):
                found = rounds(case, programs, [token, *drafts], rate=rate)
                sums += found.rounds, found.drafted, found.accepted
    assert sums[2] > sums[0]
    assert sums[1] - sums[2] > sums[0] / 4


def test_rounds_end(case: Case, programs: tuple[Any, Any, Heads]) -> None:
    """With as many tokens as are wanted, or one fewer; at a token that stops; when the time is up."""
    for count in range(4, 30):
        assert count - 1 <= len(rounds(case, programs, [5, 1, 2], count=count).tokens) <= count
    every = rounds(case, programs, [5, 1]).tokens
    for stop in set(every):
        assert rounds(case, programs, [5, 1], stops=(99, stop)).tokens[-1] == stop
    now, after, heads = programs
    now.prepare({"SEQ": 2})
    limits = {"most": MOST, "seen": 0, "rows": SIZE, "rate": 0.5, "count": 60, "stops": ()}
    assert run_rounds((now, after), heads, seconds=0.0, **limits).rounds == 1


@pytest.mark.parametrize("recurrent", [False, True])
def test_rounds_end_with_what_is_no_number(recurrent: bool, cache: CompileCache) -> None:
    """A token after which the model's logits are no numbers is the last one; without a guess there is no next round."""
    case = Case(recurrent, seed=7)
    every = case.expected([5, 1], 60, (), 0.9).tokens
    case.weights["table"][every[1]] = np.nan
    found = rounds(case, case.programs(cache), [5, 1])
    assert found.tokens in (every[:2], [*every[:2], -1])
    for exe in case.made:
        exe.close()
