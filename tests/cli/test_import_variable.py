"""RLX_IMPORT: code that runs before a command, such as definitions of custom ops."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from golden_folder import goldens

from rlx.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("own_custom_ops")


def test_a_family_takes_an_op_without_a_change(tmp_path: Path) -> None:
    """Qwen 3.5 has the formula of the example. The report, the cache and the sources show the op."""
    env = {"RLX_IMPORT": str(ROOT / "examples" / "custom_op.py"), "RLX_CACHE_DIR": str(tmp_path)}
    model = str(goldens() / "qwen35" / "model-f16.gguf")
    done = CliRunner().invoke(cli, ["compile", model, "--phase", "decode", "--explain"], env=env)
    assert done.exit_code == 0, done.output
    assert "  gated_norm " in done.stdout and "blk.{0-2,4}.attn_gate.mul x4" in done.stdout
    (digest,) = {path.parts[-3] for path in tmp_path.glob("**/ops/gated_norm.txt")}
    shown = CliRunner().invoke(cli, ["cache", "show", digest], env={"RLX_CACHE_DIR": str(tmp_path)})
    assert "ops/gated_norm.txt" in shown.output and "options.custom_ops.gated_norm: " in shown.output


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "RLX_IMPORT: no_such_file.py: FileNotFoundError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import rlx\n@rlx.custom_op\ndef silu(x):\n    return x", "custom op silu: an op of rlx has this name"),
    ],
)
def test_what_cannot_be_imported_is_named(source: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ops_of_mine.py"
    file.write_text(source or "")
    done = CliRunner().invoke(cli, ["cache", "stats"], env={"RLX_IMPORT": str(file) if source else "no_such_file.py"})
    assert done.exit_code == 2 and message in done.output
