"""The value of an answer that follows a JSON schema.

Grammar stage. Imports no pydantic: a class of pydantic models reads the text itself.
"""

from __future__ import annotations

import json
from typing import Any

from rlx.errors import GrammarError
from rlx.grammar.grammar import is_pydantic


def parsed(text: str, schema: Any, reason: str | None) -> Any:
    """What a text of JSON says: an instance of `schema` if this is a class of pydantic models.

    Args:
        reason: why the text ended, for the message.

    Raises:
        GrammarError: it is no JSON, because it was cut; or the class does not accept the value.
    """
    try:
        value = json.loads(text)
    except ValueError:
        what = f"the answer is no complete JSON: it ended with {reason or 'an error'} after {len(text)} characters"
        raise GrammarError(what, where="parsed", hint="allow more tokens, or use no stop strings") from None
    if not is_pydantic(schema):
        return value
    try:
        return schema.model_validate_json(text)
    except ValueError as error:  # of pydantic: what its class asks for beyond the schema
        raise GrammarError(f"{schema.__name__} does not accept the answer: {error}", where="parsed") from error
