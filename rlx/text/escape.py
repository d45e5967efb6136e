"""Special tokens in the texts of messages, escaped: no control token and no image comes of what somebody wrote.

Text stage, used by `chat.py`. Before a template is rendered, marks take the place of such tokens in the messages;
afterwards the marks become text again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from rlx.text.tokenizer import SpecialSplitter, Tokenizer

if TYPE_CHECKING:
    from rlx.text.image_parts import ImageTokens


class EscapedMessages:
    """Messages in which marks stand for special tokens; `encode` takes them out of the rendered text.

    A mark is plain letters and digits, which survive quoting; where a template changes one nevertheless, the text is
    spoilt, but no control token comes of it. Assistant messages may hold control tokens, but no images.

    Args:
        messages: checked ones.
        images: the tokens of images, which no message may hold; None if the model takes none.
        tools: descriptions of tools, None if there are none. They may come from strangers, too.
        trusted: whether control tokens in any message count as such.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[dict[str, Any]],
        images: ImageTokens | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        trusted: bool = False,
    ) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._mark = _unused_word(_texts([*messages, *(tools or ())]))
        self._names = images.names(tokenizer) if images else {}
        self._texts = list(self._names)
        media = SpecialSplitter({text: at for at, text in enumerate(self._texts)}) if self._names else None
        # Tokens of other types than CONTROL are found in any text: what is encoded must not contain them as a whole.
        found = {text: token in tokenizer.encode(text, False) for text, token in self._names.items()}
        self._cut = SpecialSplitter({text: at for at, text in enumerate(self._texts) if found[text]})
        self.messages = [self._escaped(m, media, trusted or m["role"] == "assistant") for m in messages]
        self.tools = None if tools is None else [self._escaped(tool, media, trusted) for tool in tools]

    def _escaped(self, value: Any, media: SpecialSplitter | None, trusted: bool) -> Any:
        if isinstance(value, str):
            if media is not None:
                parts = media.split(value)
                value = "".join(p if isinstance(p, str) else f"{self._mark}{p}i" for p in parts)
            parts = [value] if trusted else self._tokenizer.control_splitter.split(value)
            return "".join(part if isinstance(part, str) else f"{self._mark}{part}x" for part in parts)
        if isinstance(value, dict):
            return {key: self._escaped(part, media, trusted) for key, part in value.items()}
        return [self._escaped(part, media, trusted) for part in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text: control tokens and images that stand in it are the template's."""
        if self._images is not None:
            text = self._images.spread(text)
        if self._mark not in text and self._is_whole(text):
            return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        ids: list[int] = []
        for part in self._splitter.split(text):
            ids += [part] if isinstance(part, int) else self._plain(part)
        return ids

    def _is_whole(self, text: str) -> bool:
        """Whether the tokenizer finds the tokens of all images in a text."""
        images = self._images
        if images is None or images.text not in text:
            return True
        return self._tokenizer.encode(images.text, False, parse_special=True) == [images.written]

    @property
    def _splitter(self) -> SpecialSplitter:
        if not self._names:
            return self._tokenizer.control_splitter
        control = {self._tokenizer.id_to_token(token): token for token in self._tokenizer.special_ids}
        return SpecialSplitter(control | self._names)

    def _plain(self, text: str) -> list[int]:
        """The ids of a text between control tokens, with what the marks stand for as text."""
        text = re.sub(rf"{self._mark}(\d+)([xi])", self._marked, text)
        ids: list[int] = []
        begun = ""
        for part in self._cut.split(text):
            if isinstance(part, str):
                begun += part
                continue
            first, rest = self._texts[part][:1], self._texts[part][1:]
            ids += self._tokenizer.encode(begun + first, False)
            begun = rest
        return ids + self._tokenizer.encode(begun, False)

    def _marked(self, found: re.Match[str]) -> str:
        number = int(found[1])
        return self._texts[number] if found[2] == "i" else self._tokenizer.id_to_token(number)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def _unused_word(texts: Sequence[str]) -> str:
    """A word that occurs in none of `texts`, the same one every time."""
    words = (f"qz{i}token" for i in count())
    return next(word for word in words if not any(word in text for text in texts))
