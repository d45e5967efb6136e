"""The text that a decoder which serves as a reranker reads: a template around a query and a document.

Text stage. Control tokens come of the template only: in a query and in a document their texts are text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from rlx.arguments import several, text
from rlx.errors import ArgumentError, PromptError
from rlx.text.tokenizer import Tokenizer

#: Qwen3-Reranker's, where the file has none. The answer is "yes" or "no".
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")
_PLACES = re.compile(r"\{(query|document|instruction)\}")


def checked_documents(query: Any, documents: Any) -> tuple[str, list[str]]:
    """A query and its documents; `ArgumentError` where one is no text."""
    every = several("documents", documents)
    return text("query", query), [text(f"document {i}", each) for i, each in enumerate(every)]


def rerank_prompts(
    tokenizer: Tokenizer, template: str, query: str, texts: Sequence[str], most: int | None = None
) -> list[list[int]]:
    """The ids of a query and each document in a template.

    Args:
        most: of the ids of a prompt; the end of a longer document is left out, and a warning says how many are cut.
            None: no limit.

    Raises:
        PromptError: the query leaves no room for a document.
    """
    found = [_ids(tokenizer, template, query, each) for each in texts]
    long = [] if most is None else [number for number, ids in enumerate(found) if len(ids) > most]
    if most is None or not long:
        return found
    if (bare := len(_ids(tokenizer, template, query, ""))) >= most:
        raise PromptError(f"the query alone has {bare} tokens", where="rerank", hint=f"at most {most} are allowed")
    for number in long:
        kept, room = tokenizer.encode_parts(texts[number], False), most - bare
        while len(found[number]) > most:  # the last token of a cut text may become several
            found[number] = _ids(tokenizer, template, query, tokenizer.decode(kept[:room]))
            room -= 1
    warnings.warn(f"{len(long)} of {len(texts)} documents were cut to {most} tokens", stacklevel=3)
    return found


def answer_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of "yes" and "no".

    Raises:
        ArgumentError: one of them is no token.
    """
    found = [tokenizer.encode_parts(answer, False) for answer in ANSWERS]
    if any(len(ids) != 1 for ids in found):
        hint = "use a cross-encoder, or Qwen3-Reranker"
        raise ArgumentError("'yes' and 'no' are no tokens of this model", where="rerank", hint=hint)
    return found[0][0], found[1][0]


def _ids(tokenizer: Tokenizer, template: str, query: str, document: str) -> list[int]:
    values = {"query": query, "document": document, "instruction": INSTRUCTION}
    found: list[int] = []
    for part in tokenizer.control_splitter.split(template):
        if isinstance(part, int):
            found.append(part)
        else:
            found += tokenizer.encode_parts(_PLACES.sub(lambda place: values[place[1]], part), False)
    return found
