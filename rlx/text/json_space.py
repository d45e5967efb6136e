"""White space in the JSON that models write.

Text stage, used by the grammars of tool calls and of structured output.
"""

from __future__ import annotations

#: Between two tokens of JSON: a blank, or a line break and an indentation. A grammar without it keeps a model from the
#: text that it has learned, and the answers get worse; one with any white space lets a model write blanks without end.
JSON_SPACE = r" |\n( {0,24}|\t{0,6})"
