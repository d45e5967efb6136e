"""What a user types and reads: names from other tools, mistyped names, errors that speak of options, and their form."""

from __future__ import annotations

import ast
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from terminal import Terminal

from rlx.cli.command import ELSEWHERE, in_options, message, option_names
from rlx.cli.main import cli
from rlx.cli.output import wrapped
from rlx.cli.prompt import Words
from rlx.errors import ArgumentError, PromptError, SamplingError

PACKAGE = Path(__file__).parents[2] / "rlx"
DASH = "For a text that begins with a dash, write -- in front:"
CONTEXT = cli.make_context("rlx", ["run"], resilient_parsing=True)


def rlx(*args: str, **more: Any) -> Any:
    return CliRunner().invoke(cli, args, prog_name="rlx", **more)


def command(name: str) -> click.Command:
    found = cli.get_command(CONTEXT, name)
    assert found is not None
    return found


# ---------------------------------------------------------------------------------------------------- aliases


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-n 3 --temp 0.5 --top-k 7 -s 4", "--max-tokens 3 --temperature 0.5 --top-k 7 --seed 4"),
        ("--n-predict 3 --repeat-penalty 1.3 --repeat-last-n 9",
         "--max-tokens 3 --repetition-penalty 1.3 --repetition-window 9"),
        ("-c 99 -t 2 -sys short", "--max-seq 99 --threads 2 --system short"),
        ("--ctx-size 99 --system-prompt short", "--max-seq 99 --system short"),
        ("--mirostat 2 --mirostat-ent 4 --mirostat-lr 0.2 --temp 1",
         "--mirostat 2 --mirostat-tau 4 --mirostat-eta 0.2 --temperature 1"),
    ],
)  # fmt: skip
def test_what_other_tools_call_it_means_the_same(theirs: str, ours: str) -> None:
    run = command("run")
    values = [run.make_context("run", [*words.split(), "Hi"], CONTEXT).params for words in (theirs, ours)]
    assert values[0] == values[1]
    plain = run.make_context("run", ["Hi"], CONTEXT).params
    assert values[0] != plain, "it changes something"


def test_the_model_and_the_prompt_may_be_options(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    for args, expected in (
        (["-m", "a.gguf", "-p", "Hi"], ("a.gguf", "Hi")),
        (["-p", "Hi", "a.gguf"], ("a.gguf", "Hi")),
        (["a.gguf", "-f", str(file)], ("a.gguf", "from a file")),
        (["Hi", "-m", "a.gguf"], ("a.gguf", "Hi")),
        (["-hf", "org/repo:Q8_0", "Hi"], ("org/repo:Q8_0", "Hi")),
        (["-p", "Hi"], (None, "Hi")),
    ):
        params = command("run").make_context("run", [*args, "--no-stdin"], CONTEXT).params
        words = Words(params["words"], *(params[name] for name in ("model", "prompt", "file", "stdin")))
        assert words.resolve() == expected
    assert "exclude each other" in rlx("run", "-p", "Hi", "-f", str(file)).stderr
    assert "found b c: put the prompt in quotes" in rlx("run", "-m", "a", "b", "c").stderr
    assert "gone.txt: the file cannot be read: No such file" in rlx("run", "-f", "gone.txt").stderr
    assert "given twice: a and --model b" in rlx("inspect", "a", "-m", "b").stderr


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_rlx_does_not_have_says_what_to_do(name: str) -> None:
    result = rlx("run", name, "1", "Hi")
    assert result.exit_code == 2
    assert f"Error: No such option: {name}. " in result.stderr
    assert len(result.stderr.split(f"{name}. ")[1]) > 20


# ---------------------------------------------------------------------------------------------------- suggestions


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["runn", "Hi"], "No such command 'runn'. Did you mean 'run'?"),
        (["xyzzy"], "No such command 'xyzzy'. There are run, chat, serve, compile"),
        (["cache", "lss"], "No such command 'lss'. Did you mean 'ls'?"),
        (["run", "--modle", "x", "Hi"], "No such option: --modle. Did you mean --model?"),
        (["run", "-hello"], f"No such option: -hello. {DASH} rlx run -- -hello"),
        (["run", "-5 + 3 is"], f"No such option: -5 + 3 is. {DASH} rlx run -- '-5 + 3 is'"),
        (["run", "-no", "Hi"], "No such option: -no."),
        (["chat", "-hello"], "No such option: -hello."),
    ],
)  # fmt: skip
def test_a_mistyped_word_gets_a_suggestion(args: list[str], said: str) -> None:
    result = rlx(*args)
    assert result.exit_code == 2
    assert said in result.stderr


# ---------------------------------------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PromptError("it has 9 tokens", hint="open the model with a max_seq of at least 9"),
         "it has 9 tokens. Open the model with a --max-seq of at least 9."),
        (ArgumentError("KV caches of q8_0 need heads of 32", where="kv_dtype", hint='choose kv_dtype="f16"'),
         "--kv-dtype: KV caches of q8_0 need heads of 32. Choose --kv-dtype f16."),
        (SamplingError("top_p is 2.0, expected 0 to 1", where="SampleOpts"), "--top-p is 2.0, expected 0 to 1"),
        (ArgumentError("no guesses", where="generate", hint="leave `speculative` out"),
         "no guesses. Leave --speculative out."),
        (ArgumentError("no head", hint='Use speculative="prompt-lookup", which needs none.'),
         "no head. Use --speculative prompt-lookup, which needs none."),
        (ArgumentError("no end", hint="generate(..., stop_at_eog=False) goes on"), "no end"),
        (ArgumentError("n_new is 0", hint="give keep_packed=True"), "--max-tokens is 0. Give --keep-packed."),
        (PromptError("a seed of 8 threads in the cache", where="/tmp/max_seq/top_k.gguf"),
         "/tmp/max_seq/top_k.gguf: a seed of 8 threads in the cache"),
    ],
)  # fmt: skip
def test_errors_name_options(error: Exception, said: str) -> None:
    assert message(error, command("run"), "rlx run") == said


@cache
def texts() -> list[tuple[str, str]]:
    """(place, text) of what errors may say: every text with a space, in the stages below the command line."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "cli"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "1" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                text = node.value
            else:
                continue
            if " " in text:
                found.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", text))
    return found


@pytest.mark.parametrize("name", ["run", "chat", "compile", "quantize", "convert", "tune"])
def test_no_error_names_the_argument_of_an_option(name: str) -> None:
    """As `name=value`, in backticks, or as a word with an underscore."""
    options = option_names(command(name))
    wrong = []
    for place, text in texts():
        said = in_options(text, options)
        for argument in (each for each in options if each in said):
            spelled = rf"(?<![\w.]){argument}=[\w\"']|`{argument}`" + (
                rf"|(?<![\w.'\"/-]){argument} " if "_" in argument else ""
            )
            if re.search(spelled, said):
                wrong.append((place, argument, said))
    assert not wrong


# --------------------------------------------------------------------------------------------- the form of messages


@pytest.mark.parametrize(
    "words",
    [["run", "model", "hi"], ["run", "profile", "hi"], ["chat", "model"], ["serve", "threads"], ["inspect", "model"],
     ["run", "--image", "image", "hi"], ["run", "--file", "file"], ["bench", "model"], ["ppl", "tokens"],
     ["quantize", "threads", "out.gguf", "Q8_0"], ["convert", "type", "out.gguf"], ["report", "device"]],
)  # fmt: skip
def test_a_file_that_is_called_like_an_option_is_no_option(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = next(word for word in words[1:] if not word.startswith("-"))
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2 and f"Error: {name}: " in result.stderr, result.stderr
    (tmp_path / name).mkdir()
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2 and f"Error: {name}: " in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--kv-bytes", "5X", "Invalid value for '--kv-bytes': '5X' is not a size above 0. Write 500M or 2G."),
        ("--device", "gpu", "--device: device 'gpu' is not there. Did you mean 'cuda'?"),
    ],
)
def test_a_value_that_is_none_is_named_once(option: str, value: str, said: str) -> None:
    assert f"Error: {said}\n" in rlx("run", option, value, "hi", "--no-stdin").stderr


def test_an_empty_prompt_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE / "demo")  # which holds a model
    assert "Error: prompt: it is empty" in rlx("run", "", "--no-stdin").stderr


@pytest.mark.parametrize("option", ["--json-schema", "--grammar", "--image", "--file", "--chat-template", "--profile"])
def test_the_systems_reason_stands_without_its_number_and_the_name_again(option: str) -> None:
    said = CliRunner().invoke(cli, ["run", option, "nope.xyz", "hi", "--no-stdin"]).stderr
    assert "Errno" not in said and said.count("nope.xyz") == 1


def test_lines_break_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = (
        "Error: a-long-path/with-hyphens.gguf: there is no such file or directory.\n  see: rlx pull org/repo "
        + "x" * 60
    )
    found = wrapped(text, Terminal())
    assert found.split() == text.split() and len(found.splitlines()) > 3
    assert all(len(line) <= 40 for line in found.splitlines() if "xxx" not in line)
    assert wrapped(text, io.StringIO()) == text
    assert wrapped("x" * 40 + " and more", Terminal()) == "x" * 40 + "\nand more"


@pytest.mark.parametrize("words", ["--help", "run --help", "inspect", "devices", "doctor --no-measure"])
def test_pages_fit_a_narrow_terminal(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 40 columns stands only what cannot be broken: a long word, and examples to copy."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    assert cli.main(words.split(), prog_name="rlx", standalone_mode=False) in (None, 0, 2)
    long = [line for line in shown.getvalue().splitlines() if len(line) > 40 and "rlx run" not in line]
    assert all(len(max(line.split(), key=len)) > 15 for line in long), long
    assert len(shown.getvalue().splitlines()) > 2
