"""`rlx run` with a schema, a grammar or an expression: the demo model answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlx.cli.main import cli

WHO = {"who": {"enum": ["fox", "dog"]}}
SCHEMA = {"type": "object", "properties": WHO, "required": ["who"], "additionalProperties": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "who.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "yes.gbnf").write_text('root ::= "yes" | "no"\n')
    (tmp_path / "yes.lark").write_text('start: "yes" | "no"\n')
    (tmp_path / "bad.lark").write_text("start: nothing\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*options: str) -> Result:
    return CliRunner().invoke(cli, ["run", "Who is it?", *options])


def test_answers_have_the_form_that_was_asked_for(folder: Path) -> None:
    for form in ("who.json", json.dumps(SCHEMA)):
        result = run("--json-schema", form)
        assert json.loads(result.stdout)["who"] in ("fox", "dog") and "complete by its grammar" in result.stderr
    for option in ("--grammar", "--grammar-file"):
        assert run(option, "yes.gbnf").stdout in ("yes\n", "no\n")
    assert run("--grammar", "yes.lark", "--raw").stdout in ("yes\n", "no\n")
    found = json.loads(run("--regex", "[0-9]{3}", "--temperature", "1", "--json").stdout)
    assert len(found["text"]) == 3 and found["text"].isdigit() and found["end"] == "grammar"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--regex", "[0-9"], "--regex: character 0: unclosed character class"),
        (["--grammar", "bad.lark"], '--grammar: line 1, column 8: unknown name: "nothing"'),
        (["--grammar", "none.gbnf"], "none.gbnf cannot be read"),
        (["--grammar", "who.json"], "who.json is called neither .gbnf nor .lark"),
        (["--json-schema", "yes.gbnf"], "--json-schema: it is no JSON"),
        (["--json-schema", '{"not": {}}'], '--json-schema: Unimplemented keys: ["not"]. Leave it out.\n'),
        (["--regex", "a", "--json-schema", "who.json"], "--json-schema and --regex exclude each other"),
    ],
)
def test_a_mistake_is_named_before_a_model_is_opened(folder: Path, options: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["run", "no-such-model.gguf", "Who?", *options])
    assert result.exit_code == 2 and said in result.stderr
