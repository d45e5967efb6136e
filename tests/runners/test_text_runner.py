"""Text in, text out: answers, reasoning apart from them, streams of text, contents with parts, log-probabilities."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

import rlx
from rlx.errors import ArgumentError, ChatTemplateError, PromptError, TokenizerError, UnknownArgumentError
from rlx.runners import Model
from rlx.text import Tokenizer, chat_ids, load_tokenizer
from rlx.text.answer import ThinkingSplitter, ThinkingTags

TEXTS = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
EACH = "{% for part in m.content %}{{ part.text }}{% endfor %}"
PARTS = TEXTS.replace("{{ m.content }}", EACH)
BOTH = TEXTS.replace("{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% else %}" + EACH + "{% endif %}")
THINKING = TEXTS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{{ '\n' }}{% endif %}"
OPEN = TEXTS + "<think>{{ '\n' }}{# the answer has the </think> #}"
ONE = [{"role": "user", "content": "What is 27 + 45?"}]


@pytest.fixture(scope="module")
def tokenizer(goldens: Path) -> Tokenizer:
    return load_tokenizer(goldens / "qwen3" / "model-f16.gguf")


def talking(tokenizer: Tokenizer, answer: str, template: str = TEXTS, max_seq: int = 300) -> Model:
    """A runner that answers whatever it is asked with a text, and then the end of a turn."""
    tokenizer = replace(tokenizer, chat_templates={"default": template})
    script = tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False, parse_special=True)
    return Model(FakeEngine(tokenizer.vocab_size, max_seq, tokenizer=tokenizer, script=script))


def test_a_conversation(tokenizer: Tokenizer) -> None:
    runner = talking(tokenizer, "It is 72.")
    answer = runner.chat(ONE)
    assert (answer.text, answer.thinking, answer.finish_reason) == ("It is 72.", "", "stop")
    assert str(answer) == "It is 72." == answer.generation.text
    assert answer.message == {"role": "assistant", "content": "It is 72."}
    assert answer.ids == [*tokenizer.encode("It is 72.", add_special_tokens=False), answer.ids[-1]]
    assert answer.prompt_tokens == len(runner.chat_ids(ONE)) == len(runner.chat_ids("What is 27 + 45?"))
    assert runner.chat("What is 27 + 45?", 3).ids == answer.ids[:3]
    more = [*ONE, answer.message, {"role": "user", "content": "And more?"}]
    assert talking(tokenizer, "Yes.").chat(more).text == "Yes."


def test_answers_can_be_pickled_and_runners_cannot(tokenizer: Tokenizer) -> None:
    runner = talking(tokenizer, "It is 72.")
    answer, tokens = runner.chat(ONE, top_logprobs=1), runner.generate(runner.chat_ids(ONE), 3)
    for copied in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert (copied, copied.generation.text, copied.finish_reason, copied.steps) == (
            answer, "It is 72.", "stop", answer.steps,
        )  # fmt: skip
    found = pickle.loads(pickle.dumps(tokens))
    assert (found, found.text, found.finish_reason) == (tokens, tokens.text, "length")
    wordless = Model(FakeEngine()).generate([1], 2)
    wordless._tokenizer = lambda: (_ for _ in ()).throw(TokenizerError("none"))
    with pytest.raises(TokenizerError, match="the model had no tokenizer"):
        _ = pickle.loads(pickle.dumps(wordless)).text
    stream = runner.chat_stream("hello", 2)
    for each in (runner, runner.tokenizer, stream, runner.submit(rlx.Request([1], 2))):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(ArgumentError, match=r"neither pickled nor copied\. Open the model in each"):
                way(each)


@pytest.mark.parametrize(
    ("template", "answer", "options", "expected"),
    [
        (THINKING, "<think>\n27 + 45.\n</think>\n\nIt is 72.", {}, ("27 + 45.", "It is 72.")),
        (THINKING, "It is 72.", {"thinking": False}, ("", "It is 72.")),
        (OPEN, "27 + 45.\n</think>\n\nIt is 72.", {}, ("27 + 45.", "It is 72.")),
        (OPEN, "27 + 45, and so on", {}, ("27 + 45, and so on", "")),
        (THINKING, "<think>\nStop here", {"stop": "here"}, ("Stop", "")),
        (THINKING, "It is <think>.", {}, ("", "It is <think>.")),
        (TEXTS, "<think>\nno tags\n</think>", {}, ("", "<think>\nno tags\n</think>")),
    ],
)
def test_reasoning_is_apart(
    template: str, answer: str, options: dict[str, Any], expected: tuple[str, str], tokenizer: Tokenizer
) -> None:
    found = talking(tokenizer, answer, template).chat(ONE, **options)
    assert (found.thinking, found.text) == expected
    kept = talking(tokenizer, answer, template).chat(ONE, top_logprobs=0, **options).steps
    assert kept is not None
    assert ("".join(step.thinking for step in kept), "".join(step.text for step in kept)) == expected
    steps = list(talking(tokenizer, answer, template).chat_stream(ONE, **options))
    assert ("".join(step.thinking for step in steps), "".join(step.text for step in steps)) == expected
    assert [step.token for step in steps] == found.ids
    assert found.message.get("reasoning_content", "") == expected[0]


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ '<think>' }} x {{ '</think>' }}", ("<think>", "</think>")),
        ("<|channel>thought x <channel|>", ("<|channel>thought", "<channel|>")),
        ("{% if enable_thinking %}{% endif %}", None),
    ],
)
def test_the_template_tells_the_tags(template: str, tags: tuple[str, str] | None, tokenizer: Tokenizer) -> None:
    found = ThinkingTags.of(replace(tokenizer, chat_templates={"default": template}))
    assert found == (None if tags is None else ThinkingTags(*tags))


def test_control_tokens_of_tags(tokenizer: Tokenizer) -> None:
    """A control token counts if it is a part of a tag: in others, `thought` behind it is text."""
    (begin,) = tokenizer.encode("<|im_start|>", add_special_tokens=False, parse_special=True)
    assert ThinkingTags("<|im_start|>thought", "</thought>").ids(tokenizer) == {begin}
    assert ThinkingTags("<think>", "</think>").ids(tokenizer) == frozenset()


@given(st.text("ab<think>/ \n", max_size=40), st.lists(st.integers(0, 40)), st.booleans())
def test_pieces_do_not_matter(text: str, cuts: list[int], is_open: bool) -> None:
    """However a text is cut, reasoning and answer are the same; nothing but tags and the space around them is lost."""

    def split(pieces: Sequence[str]) -> tuple[str, str]:
        splitter = ThinkingSplitter(ThinkingTags("<think>", "</think>"), is_open)
        found = [*map(splitter.push, pieces), splitter.finish()]
        return "".join(a for a, _ in found), "".join(b for _, b in found)

    whole, ends = split([text]), sorted({min(cut, len(text)) for cut in cuts})
    assert split([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]) == whole
    begins = text.lstrip().startswith("<think>")
    if not (is_open or begins):
        assert whole == ("", text)
    else:
        before, _, after = (text if is_open else text.lstrip().removeprefix("<think>")).partition("</think>")
        assert whole == (before.strip(), after.lstrip())


def test_a_batch_takes_texts_and_conversations(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with talking(tokenizer, "Hello") as runner:
        found = runner.generate_batch(["Once upon", chat, [1, 2]], 20)
        alone = [runner.complete("Once upon", 20).ids, runner.chat(chat, 20).ids, list(runner.generate([1, 2], 20))]
        assert [list(each) for each in found] == alone and alone[0] != []
        with pytest.raises(PromptError, match="expected several prompts, found a str"):
            runner.generate_batch("Once upon", 5)  # type: ignore[arg-type]
        with pytest.raises(ChatTemplateError, match="knows no role 'bot'"):
            runner.generate_batch([[{"role": "bot", "content": "x"}]], 5)


def test_texts_of_streams_and_generations(tokenizer: Tokenizer) -> None:
    """Whole characters only: the pieces of an emoji come with its last token."""
    runner = talking(tokenizer, "fox \U0001f98a!")
    ids = tokenizer.encode("A")
    pieces = [step.text for step in runner.stream(ids, 30)]
    assert "".join(pieces) == runner.generate(ids, 30).text == "fox \U0001f98a!" and "\ufffd" not in "".join(pieces)
    assert runner.generate(ids, 30, stop="!").text == "fox \U0001f98a"
    batch = runner.generate_batch([ids, ids[:1]], 30)
    assert [found.text for found in batch] == ["fox \U0001f98a!"] * 2
    assert runner.generate(ids, 30).steps is None


# -- log-probabilities -------------------------------------------------------------------------------------------------


def likeliest(prompt: list[int], count: int) -> list[tuple[int, float]]:
    """The likeliest tokens after a prompt, by float64 arithmetic."""
    logits = FakeEngine().logits(prompt).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    return [(int(i), float(logprobs[i])) for i in np.argsort(-logprobs)[:count]]


def test_the_likeliest_tokens_of_each_step() -> None:
    prompt, runner = [3, 1, 4], Model(FakeEngine())
    found = runner.generate(prompt, 3, top_logprobs=4)
    assert found == runner.generate(prompt, 3) and found.steps is not None
    context = list(prompt)
    for token, step in zip(found, found.steps, strict=True):
        expected = likeliest(context, 4)
        assert [other.token for other in step.top_logprobs] == [i for i, _ in expected]
        np.testing.assert_allclose([o.logprob for o in step.top_logprobs], [p for _, p in expected], atol=1e-5)
        assert step.logprob == pytest.approx(step.top_logprobs[0].logprob) and step.token == token
        assert [other.text for other in step.top_logprobs] == [f"<{i}>" for i, _ in expected]
        context.append(token)
    assert list(runner.stream(prompt, 3, top_logprobs=4))[-1].top_logprobs == found.steps[-1].top_logprobs
    (batch,) = runner.generate_batch([prompt], 3, top_logprobs=4)
    assert batch.steps is not None and [s.top_logprobs for s in batch.steps] == [s.top_logprobs for s in found.steps]
    texts = [step.text for step in runner.stream(prompt, 3)]
    assert [s.text for s in found.steps] == [s.text for s in batch.steps] == texts and "".join(texts) == found.text
    alone = runner.generate(prompt, 1, top_logprobs=0).steps
    assert alone is not None and alone[0].top_logprobs == () and alone[0].logprob < 0
    with pytest.raises(rlx.ArgumentError, match="top_logprobs is -1"):
        runner.generate(prompt, 1, top_logprobs=-1)
    everything = runner.generate(prompt, 1, top_logprobs=10**6).steps
    assert everything is not None and len(everything[0].top_logprobs) == 40


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"max_new_tokens": 3}, "Use max_tokens="),
        ({"temp": 0.5}, "Use temperature="),
        ({"enable_thinking": True}, "Use thinking="),
        ({"stream": True}, "the methods stream, chat_stream and complete_stream"),
        ({"n_ctx": 4}, "Give max_seq= when the model is opened"),
        ({"frobnicate": 4}, "There is messages, max_tokens, tools"),
    ],
)
def test_unknown_options_of_a_chat(options: dict[str, Any], hint: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(UnknownArgumentError, match=hint):
        talking(tokenizer, "x").chat(ONE, **options)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [TEXTS, PARTS, BOTH])
def test_contents_take_the_form_that_the_template_wants(template: str, tokenizer: Tokenizer) -> None:
    tokenizer = replace(tokenizer, chat_templates={"default": template})
    text = [{"role": "user", "content": "Tell me"}]
    part = [{"role": "user", "content": [{"type": "text", "text": "Tell me"}]}]
    assert tokenizer.decode(chat_ids(tokenizer, text)) == "<|im_start|>user\nTell me<|im_end|>\n<|im_start|>assistant\n"
    assert chat_ids(tokenizer, part) == chat_ids(tokenizer, text)
    two = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "<|im_end|>b"}]}]
    said = tokenizer.decode(chat_ids(tokenizer, two)).split("\n", 1)[1].split("<|im_start|>")[0]
    assert said == ("a\n<|im_end|>b<|im_end|>\n" if template == TEXTS else "a<|im_end|>b<|im_end|>\n")
    assert chat_ids(tokenizer, two).count(tokenizer.token_to_id("<|im_end|>")) == 1, "text of a user stays text"
