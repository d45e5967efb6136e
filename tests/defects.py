"""Defects that somebody may make, one in each stage, and the tests that find them: `plant_defects.py` tries them out.

A defect replaces a text that occurs once in the sources of rlx, wherever it stands. Whoever changes or moves such a
text writes the same defect for the new one here; `test_defects.py` says when that is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Defect(NamedTuple):
    """A change of one place that makes rlx wrong.

    Attributes:
        name: the stage, and what is wrong then.
        old: the text, which occurs once.
        new: what stands there with the defect.
        tests: arguments of pytest; one of these tests fails with the defect.
    """

    name: str
    old: str
    new: str
    tests: str

    def place(self, root: Path = ROOT) -> Path:
        """The file that holds the text.

        Raises:
            LookupError: there is none, or more than one.
        """
        found = [path for path in sources(root) for _ in range(path.read_text("utf-8").count(self.old))]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {self.old!r} occurs {len(found)} times in rlx, expected once")
        return found[0]


def sources(root: Path = ROOT) -> Iterator[Path]:
    return (path for path in sorted((root / "rlx").rglob("*.py")) if "__pycache__" not in path.parts)


DEFECTS = (
    # The IR, the meanings of ops, and the passes.
    Defect(
        "ir: two elementwise expressions of one region lose the order of their operands",
        "return (name, *(renumber(a, numbers) for a in arguments[:arity]), *arguments[arity:])",
        "return (name, *(renumber(a, numbers) for a in arguments[:arity][::-1]), *arguments[arity:])",
        "tests/ir tests/passes",
    ),
    Defect(
        "ir: an interleaved section takes one pair too many",
        "return which if turn < sections[which] else 0",
        "return which if turn <= sections[which] else 0",
        "tests/ir",
    ),
    Defect(
        "meaning: a window shows one key too many",
        'hidden = hidden | (own[:, None] - keys >= a["window"])',
        'hidden = hidden | (own[:, None] - keys > a["window"])',
        "tests/ir",
    ),
    Defect(
        "rules: gated experts swap gate and up",
        'after = ops.make("expert_linear", _x, ids, w, u, gated=act, tiles=_tiles)',
        'after = ops.make("expert_linear", _x, ids, u, w, gated=act, tiles=_tiles)',
        "tests/ir/test_rules.py tests/passes",
    ),
    Defect(
        "last row: rows of a batch are cut before an op that needs its whole sequence",
        "            return False  # its rows are the last ones of a sequence\n",
        "            pass\n",
        "tests/passes tests/runtime",
    ),
    Defect(
        "schedule: what a worker computes for itself is judged by its smallest size",
        "most = sum(cost(node, {s: limits[s][1] for s in used}))",
        "most = sum(cost(node, {s: limits[s][0] for s in used}))",
        "tests/passes",
    ),
    Defect(
        "memory: a value is freed in the region that reads it last",
        "taken = [s for s in taken if s.until >= made or not reuse]",
        "taken = [s for s in taken if s.until > made or not reuse]",
        "tests/passes",
    ),
    Defect(
        "specialize: sizes inside of tuples stay symbols",
        "return tuple(_bind(v, constants) for v in value)",
        "return value",
        "tests/passes",
    ),
    Defect(
        "fuse: a value that others read in f32 is rounded",
        'return operand.op == "elementwise" and readers[reader.inputs[0]] == 1',
        'return operand.op == "elementwise" and readers[reader.inputs[0]] >= 1',
        "tests/passes",
    ),
    Defect(
        "layout: a table that is also multiplied stays as it is in the file",
        "found = read | dict.fromkeys([*multiplied, *(read.keys() & set(packed))], layouts.matrices)",
        "found = dict.fromkeys([*multiplied, *(read.keys() & set(packed))], layouts.matrices) | read",
        "tests/passes",
    ),
    # Kernels and the target.
    Defect(
        "linear: the smallest two scales of MXFP4 are swapped",
        'e.b.select(e.b.icmp_unsigned("==", x, e.i32(0)), e.i32(1 << 21), e.i32(1 << 22))',
        'e.b.select(e.b.icmp_unsigned("==", x, e.i32(0)), e.i32(1 << 22), e.i32(1 << 21))',
        "tests/backends/cpu/test_linear.py tests/backends/cpu/test_linear_tiles.py",
    ),
    Defect(
        "packing: the third scale of Q3_K takes another two bits",
        "top = (high >> u32((i & 3) * 8 + (i >> 2) * 2)) & u32(3)",
        "top = (high >> u32((i & 3) * 8 + (i >> 3) * 2)) & u32(3)",
        "tests/backends/cpu/test_pack_embedding.py",
    ),
    Defect(
        "attention: a window's first chunk is left out where it shows only its last key",
        "return e.b.and_(e.smax(e.b.sub(position, e.i64(window - 1)), 0), e.i64(-CHUNK))",
        "return e.b.and_(e.smax(e.b.sub(position, e.i64(window - 2)), 0), e.i64(-CHUNK))",
        "tests/backends/cpu/test_attention.py",
    ),
    Defect(
        "attention: a window hides the oldest key",
        "e.b.trunc(e.clamp(e.b.sub(position, e.i64(window)), -1, 2 * CHUNK), I32)",
        "e.b.trunc(e.clamp(e.b.sub(position, e.i64(window - 1)), -1, 2 * CHUNK), I32)",
        "tests/backends/cpu/test_attention.py",
    ),
    Defect(
        "delta rule: the result forgets the decay",
        "total = e.fma(product, deltas[-1], e.b.fmul(decay, asked))",
        "total = e.fma(product, deltas[-1], asked)",
        "tests/backends/cpu/test_delta.py",
    ),
    Defect(
        "rope: the first element that does not turn is left out",
        "for i in range(N_ROT, HEAD_DIM):",
        "for i in range(N_ROT + 1, HEAD_DIM):",
        "tests/backends/cpu/test_rows.py",
    ),
    Defect(
        "norms: a layer norm divides by one less",
        "sqrt(sum_of_centred_squares(x, src, src + width, mean) / f32(width) + f32(eps))",
        "sqrt(sum_of_centred_squares(x, src, src + width, mean) / f32(width - 1) + f32(eps))",
        "tests/backends/cpu/test_rows.py",
    ),
    Defect(
        "target: a feature that is taken away after it was added stays",
        "added, removed = added - named, removed | named",
        "added, removed = added, removed | named",
        "tests/backends/cpu/test_target.py",
    ),
    # The key of a program, and the store.
    Defect(
        "key: programs of two vectorizer settings are the same",
        '"LOOP_VECTORIZE OPT SLP_VECTORIZE"',
        '"OPT SLP_VECTORIZE"',
        "tests/runtime/test_key.py",
    ),
    Defect(
        "store: an entry of this process goes before those of others",
        "key=lambda row: (row.digest in own, row.last_used)",
        "key=lambda row: (row.digest not in own, row.last_used)",
        "tests/runtime/test_store.py",
    ),
    Defect(
        "store: a torn file is used",
        "wrong = [name for name, data in files.items() if sha256(data) != sums[name]]",
        "wrong = [name for name, data in files.items() if not data]",
        "tests/runtime/test_store.py",
    ),
    Defect(
        "store: a file with a second name, which somebody else may change, is used",
        "if _POSIX and info.st_nlink != 1:",
        "if _POSIX and info.st_nlink > 2:",
        "tests/runtime/test_store.py",
    ),
    # Weights, tokenizers, templates, tools.
    Defect(
        "weights: FP8 takes the scales of the row blocks before",
        "rows, columns = np.arange(n) // block[0],",
        "rows, columns = (np.arange(n) - 1).clip(0) // block[0],",
        "tests/weights/test_fp8.py",
    ),
    Defect(
        "export: rows of q and k are permuted the wrong way round",
        "split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])",
        "split = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])",
        "tests/export",
    ),
    Defect(
        "export: a norm that has no offset gets one",
        'if offset and name.endswith("norm.weight") and name.removesuffix(".weight") not in config.row.plain_norms:',
        'if offset and name.endswith("norm.weight"):',
        "tests/export",
    ),
    Defect(
        "rope: Llama 3's scaling keeps the low frequencies",
        "return (1 - keep) / scaling.factor + keep",
        "return (1 - keep) + keep / scaling.factor",
        "tests/models",
    ),
    Defect(
        "tokenizer: a second BOS comes before the one of the text",
        "prefix = () if self.prefix and tuple(ids[: len(self.prefix)]) == self.prefix else self.prefix",
        "prefix = self.prefix",
        "tests/text",
    ),
    Defect(
        "detokenizer: a space at the start of each token is dropped",
        'piece, self._drop_space = piece.removeprefix(b" "), False',
        'piece = piece.removeprefix(b" ")',
        "tests/text",
    ),
    Defect(
        "template: what looks like a control token at the end of an answer is not taken for the end of the turn",
        "return frozenset({last}) if last is not None and last == inner else frozenset()",
        "return frozenset({last}) if last is not None else frozenset()",
        "tests/text",
    ),
    Defect(
        "tool calls: a whole number is no number",
        'if kind in allowed or (kind == "integer" and "number" in allowed):',
        "if kind in allowed:",
        "tests/text",
    ),
    # Vision.
    Defect(
        "vision: images are resized with other weights",
        "BILINEAR, BICUBIC = 2, 3",
        "BILINEAR, BICUBIC = 2, 1",
        "tests/vision",
    ),
    Defect(
        "vision: patches of a block go from top to bottom first",
        "return np.ascontiguousarray(both.transpose(0, 2, 1, 3, 4)).reshape(-1, 2)",
        "return np.ascontiguousarray(both.transpose(0, 2, 3, 1, 4)).reshape(-1, 2)",
        "tests/vision",
    ),
    Defect(
        "vision: text after an image goes on one position too early",
        "shift += span.extent - len(span.rows)",
        "shift += span.extent - len(span.rows) - 1",
        "tests/runners/test_image_sequences.py",
    ),
    # Sampling and grammars.
    Defect(
        "sampling: top-p leaves out the token that reaches the share",
        "order[: int(sums.searchsorted(target)) + 1]",
        "order[: max(1, int(sums.searchsorted(target)))]",
        "tests/sampling",
    ),
    Defect(
        "sampling: the repetition penalty raises negative logits",
        "if value > 0 else value * opts.repetition_penalty",
        "if value > 0 else value / opts.repetition_penalty",
        "tests/sampling",
    ),
    Defect(
        "sampling: XTC removes the least likely of the top choices, too",
        "return np.delete(above, least)",
        "return above",
        "tests/sampling",
    ),
    Defect(
        "sampling: a token that a grammar forces is not part of the history",
        "            self._adapt(float(surprises[token]))\n        self._recent.append(token)\n",
        "            self._adapt(float(surprises[token]))\n",
        "tests/sampling",
    ),
    Defect(
        "grammar: a token that the model has no logit for is forced",
        "if token >= width), len(found))",
        "if token > width), len(found))",
        "tests/grammar",
    ),
    Defect(
        "grammar: a stop id ends an answer that is not complete",
        '            if not self._matcher.is_accepting():\n                raise GrammarError(f"the answer is not',
        '            if self._matcher.is_error():\n                raise GrammarError(f"the answer is not',
        "tests/grammar",
    ),
    # The pool, and what is computed with it.
    Defect(
        "prefix index: a checkpoint at the place of a split goes to the wrong side",
        "sides[length > at][length] = checkpoint",
        "sides[length >= at][length] = checkpoint",
        "tests/e2e/test_pool.py tests/runners/test_sessions.py",
    ),
    Defect(
        "pool: a page that another sequence reads is written",
        "return bool(self.owners[page] > 1 and position < self.frozen[page])",
        "return bool(self.owners[page] > 2 and position < self.frozen[page])",
        "tests/runtime/test_pages.py tests/e2e/test_pool.py",
    ),
    Defect(
        "rings: their room is one position short for calls of many rows",
        "needed = min(needed, _round_up(window + rows - 1 + page - 1, page))",
        "needed = min(needed, _round_up(window + rows - 1, page))",
        "tests/runtime/test_rings.py",
    ),
    Defect(
        "snapshot: a file whose content was changed is taken",
        "if found.digest() != digest:",
        "if len(found.digest()) != len(digest):",
        "tests/runtime/test_snapshot_file.py",
    ),
    Defect(
        "speculation: after a wrong draft one token too few is kept",
        "job.rewind(job.position)",
        "job.rewind(job.position - 1)",
        "tests/runners/test_speculative.py",
    ),
    Defect(
        "scheduler: the lowest priority goes first",
        "return -job.request.priority, (job.record.submitted or 0.0) + patience",
        "return job.request.priority, (job.record.submitted or 0.0) + patience",
        "tests/runners/test_executor.py",
    ),
    Defect(
        "pausing: paused jobs go on in the wrong order",
        "for job in sorted(able, key=lambda job: job.order):\n            try:\n                self._load(job)",
        "for job in able:\n            try:\n                self._load(job)",
        "tests/runners/test_executor.py",
    ),
    Defect(
        "stopping: a stop string that lacks only its last character is not held back",
        "longest = min(max(map(len, markers), default=1) - 1, len(text))",
        "longest = min(max(map(len, markers), default=2) - 2, len(text))",
        "tests/runners/test_stopping.py",
    ),
    # The server and the command line.
    Defect(
        "server: a prompt for which the pool is too small asks for another try",
        "status = 400 if error.total and error.needed > error.total else 503",
        "status = 503",
        "tests/serve/test_middleware.py",
    ),
    Defect(
        "server: the keys of others are accepted",
        "if not sum([hmac.compare_digest(digest, each) for each in self._digests]):",
        "if not self._digests:",
        "tests/serve/test_middleware.py",
    ),
    Defect(
        "server: one request more than the queue holds comes in",
        "if self.inside >= self.slots + self.queue:",
        "if self.inside > self.slots + self.queue:",
        "tests/serve/test_middleware.py",
    ),
    Defect(
        "server: Anthropic's input tokens count those of the cache twice",
        '"input_tokens": usage.prompt_tokens - usage.cached_tokens,\n        "cache_creation',
        '"input_tokens": usage.prompt_tokens,\n        "cache_creation',
        "tests/serve/test_messages.py",
    ),
    Defect(
        "server: offsets of log-probabilities stand behind their tokens",
        "            offsets.append(self._offset)\n            self._offset += len(self._decode(info.chosen.bytes))\n",
        "            self._offset += len(self._decode(info.chosen.bytes))\n            offsets.append(self._offset)\n",
        "tests/serve/test_completions.py",
    ),
    Defect(
        "command line: a window of all tokens is the default window",
        "{name: None for name in WINDOWS if chosen.get(name) == _ALL}",
        '{name: None for name in ("dry_penalty_last_n",) if chosen.get(name) == _ALL}',
        "tests/cli/test_sampling_options.py",
    ),
    Defect(
        "profile: what both phases say overrides what one says",
        "return {**self.common, **self.phases[phase]}",
        "return {**self.phases[phase], **self.common}",
        "tests/profiles/test_profile.py",
    ),
    Defect(
        "report: waits count twice",
        "waited = min(mean_wait(times, i), seconds)\n        working = seconds - waited",
        "waited = min(mean_wait(times, i), seconds)\n        working = seconds",
        "tests/report",
    ),
    Defect(
        "ray: an answer that has begun is computed again",
        "                if sent.has_begun:\n                    return await sent.break_off",
        "                if sent.has_begun and attempt == ATTEMPTS:\n                    return await sent.break_off",
        "tests/on_ray",
    ),
)
