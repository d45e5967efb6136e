"""rlx: language models from Python, with kernels generated for the machine they stand on.

    import rlx

    runner = rlx.auto_runner("model.gguf")
    print(runner.chat("What is 27 + 45?", max_tokens=64).text)

The compiler alone: `rlx.Graph`, `rlx.ops`, `rlx.compile`. Names are imported when they are first used, so that
`import rlx` and `rlx --help` stay quick.
"""

from __future__ import annotations

from rlx.lazy import names_of

TYPE_CHECKING = False  # what `typing` would say; to import it costs more than all else here

if TYPE_CHECKING:
    from rlx import scalars
    from rlx.backends import Device, Target, devices
    from rlx.compiler.executable import Executable, compile
    from rlx.engine.kv.snapshot import Snapshot
    from rlx.errors import (
        AmbiguousModelError,
        ArgumentError,
        BatchError,
        BusyError,
        CacheError,
        ChatError,
        ChatTemplateError,
        CompileError,
        ConfigError,
        CustomOpError,
        DeadlineError,
        DownloadError,
        GgufError,
        GrammarError,
        GraphError,
        ImageError,
        IrSyntaxError,
        ModelFileError,
        MultimodalError,
        NumericalError,
        OutputError,
        PoolFullError,
        ProfileError,
        PromptError,
        ResourceError,
        RlxError,
        SafetensorsError,
        SamplingError,
        ShapeError,
        SnapshotError,
        TargetError,
        TokenizerError,
        ToolError,
        UnknownArgumentError,
        UnsupportedModelError,
        WeightError,
    )
    from rlx.grammar.grammar import Grammar
    from rlx.ir import dtypes, ops
    from rlx.ir.custom import CustomOp, custom_op
    from rlx.ir.dims import CTX, PAST_SEQ, SEQ, Dim
    from rlx.ir.graph import Graph
    from rlx.profile import CompileProfile
    from rlx.prompt import Prompt
    from rlx.runners import (
        Answer,
        EncoderRunner,
        FinishReason,
        GemmaRunner,
        Generation,
        Handle,
        Llama32Runner,
        LmRunner,
        Qwen3Runner,
        Qwen35Runner,
        Request,
        Step,
        Stream,
        TokenLogprob,
        auto_runner,
    )
    from rlx.runners.generator import GemmaGenerator, TokenGenerator
    from rlx.sampling import SampleOpts
    from rlx.store.cache import CompileCache
    from rlx.text import StreamDetokenizer, Tokenizer, load_tokenizer
    from rlx.text.tool_calls import ToolCall, ToolCallDelta
    from rlx.tracing import trace

__version__ = "0.2.0"

_HOME = {
    "dtypes": "rlx.ir.dtypes",
    "ops": "rlx.ir.ops",
    "scalars": "rlx.scalars",
    **dict.fromkeys(("Answer", "FinishReason", "Generation", "Handle", "Request"), "rlx.runners"),
    **dict.fromkeys(("Step", "Stream", "TokenLogprob"), "rlx.runners"),
    "Snapshot": "rlx.engine.kv.snapshot",
    "devices": "rlx.backends",
    "Device": "rlx.backends",
    "Target": "rlx.backends",
    "CTX": "rlx.ir.dims",
    "PAST_SEQ": "rlx.ir.dims",
    "SEQ": "rlx.ir.dims",
    "Dim": "rlx.ir.dims",
    "CustomOp": "rlx.ir.custom",
    "custom_op": "rlx.ir.custom",
    "Graph": "rlx.ir.graph",
    "CompileProfile": "rlx.profile",
    "Prompt": "rlx.prompt",
    "GemmaGenerator": "rlx.runners.generator",
    "GemmaRunner": "rlx.runners",
    "Grammar": "rlx.grammar.grammar",
    "Llama32Runner": "rlx.runners",
    "EncoderRunner": "rlx.runners",
    "LmRunner": "rlx.runners",
    "Qwen3Runner": "rlx.runners",
    "Qwen35Runner": "rlx.runners",
    "SampleOpts": "rlx.sampling",
    "auto_runner": "rlx.runners",
    "CompileCache": "rlx.store.cache",
    "Executable": "rlx.compiler.executable",
    "compile": "rlx.compiler.executable",
    "StreamDetokenizer": "rlx.text",
    "TokenGenerator": "rlx.runners.generator",
    "Tokenizer": "rlx.text",
    "load_tokenizer": "rlx.text",
    "ToolCall": "rlx.text.tool_calls",
    "trace": "rlx.tracing",
    "ToolCallDelta": "rlx.text.tool_calls",
}


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "CTX",
    "PAST_SEQ",
    "SEQ",
    "AmbiguousModelError",
    "Answer",
    "ArgumentError",
    "BatchError",
    "BusyError",
    "CacheError",
    "ChatError",
    "ChatTemplateError",
    "CompileCache",
    "CompileError",
    "CompileProfile",
    "ConfigError",
    "CustomOp",
    "CustomOpError",
    "DeadlineError",
    "Device",
    "Dim",
    "DownloadError",
    "EncoderRunner",
    "Executable",
    "FinishReason",
    "GemmaGenerator",
    "GemmaRunner",
    "Generation",
    "GgufError",
    "Grammar",
    "GrammarError",
    "Graph",
    "GraphError",
    "Handle",
    "ImageError",
    "IrSyntaxError",
    "Llama32Runner",
    "LmRunner",
    "ModelFileError",
    "MultimodalError",
    "NumericalError",
    "OutputError",
    "PoolFullError",
    "ProfileError",
    "Prompt",
    "PromptError",
    "Qwen3Runner",
    "Qwen35Runner",
    "Request",
    "ResourceError",
    "RlxError",
    "SafetensorsError",
    "SampleOpts",
    "SamplingError",
    "ShapeError",
    "Snapshot",
    "SnapshotError",
    "Step",
    "Stream",
    "StreamDetokenizer",
    "Target",
    "TargetError",
    "TokenGenerator",
    "TokenLogprob",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "ToolCallDelta",
    "ToolError",
    "UnknownArgumentError",
    "UnsupportedModelError",
    "WeightError",
    "__version__",
    "auto_runner",
    "compile",
    "custom_op",
    "devices",
    "dtypes",
    "load_tokenizer",
    "ops",
    "scalars",
    "trace",
]

__getattr__ = names_of("rlx", {**dict.fromkeys(__all__, "rlx.errors"), **_HOME})
