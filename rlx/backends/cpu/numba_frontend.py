"""Lowers a plain Python function to LLVM assembly with Numba's type inference and lowering.

Numba's public `cfunc` compiles for the host and optimizes twice; rlx optimizes once, for its own target. So this module
runs only the front end of Numba's pipeline, on reduced contexts. They load only the registries that scalar loops need
and use the C calling convention from the start. The output has no Python API calls, no reference counting and no
environment object. Numba's internals are private API, so pyproject pins the minor version.

Importing this module imports Numba, so `templates.py` imports it only for the first lowering.
"""
# mypy: disable-error-code="misc,name-defined,no-untyped-call,untyped-decorator,attr-defined,assignment"

from __future__ import annotations

import operator
import re
import threading
import types as python_types
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba.core import base, callconv, compiler, imputils, lowering, types, typing
from numba.core import typed_passes as typed
from numba.core import untyped_passes as untyped
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.errors import LoweringError, NumbaError
from numba.core.typing.templates import AbstractTemplate, ConcreteTemplate, builtin_registry

from rlx.errors import CompileError
from rlx.scalars import Primitive

#: Data layout of x86-64. Lowering uses it only to see whether a value fits registers; the real one is set later.
_DATA_LAYOUT = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
_FLOAT_OPS = frozenset({"fadd", "fsub", "fmul", "fdiv", "frem", "fcmp"})
_LABEL = re.compile(r'"?B(\d+)[.\w]*"?:')
_TARGET = re.compile(r'label %"?B(\d+)"?(?![.\w])')
_LOCK = threading.RLock()


def _numba_type(name: str) -> Any:
    """The Numba type of a name such as `f32`, `u8`, `i64`, `*u8` or `none`."""
    if name.startswith("*"):
        return types.CPointer(_numba_type(name[1:]))
    kinds = {"f": "float", "i": "int", "u": "uint"}
    return types.none if name == "none" else getattr(types, kinds[name[0]] + name[1:])


def _type_name(ty: Any) -> str:
    if isinstance(ty, types.CPointer):
        return "*" + _type_name(ty.dtype)
    return re.sub(r"^(f|i|u)(?:loat|int|nt)(\d+)$", r"\1\2", str(ty))


@dataclass
class _Text:
    """The LLVM text of one Python function and of everything that it calls."""

    function: str
    signature: Any
    functions: dict[str, str] = field(default_factory=dict)
    declarations: set[str] = field(default_factory=set)


class _CConvention(callconv.BaseCallConv):
    """The C calling convention. Kernels cannot raise, so functions return no status."""

    def _make_call_helper(self, builder: Any) -> None:
        return None

    def get_function_type(self, restype: Any, argtypes: Any) -> Any:
        result = ir.VoidType() if restype == types.none else self.context.get_value_type(restype)
        return ir.FunctionType(result, [self.context.get_value_type(t) for t in argtypes])

    def decorate_function(self, fn: Any, args: Any, fe_argtypes: Any, noalias: bool = False) -> None:
        for value, name, ty in zip(fn.args, args, fe_argtypes, strict=True):
            value.name = name
            if noalias and isinstance(ty, types.CPointer):
                value.add_attribute("noalias")

    def get_arguments(self, fn: Any) -> Any:
        return fn.args

    def return_value(self, builder: Any, value: Any) -> None:
        if isinstance(builder.function.function_type.return_type, ir.VoidType):
            builder.ret_void()
        else:
            builder.ret(value)

    def return_native_none(self, builder: Any) -> None:
        builder.ret_void()

    def return_user_exc(self, builder: Any, exc: Any, args: Any = None, loc: Any = None, func_name: Any = None) -> None:
        if loc is not None:
            raise LoweringError(f"a kernel cannot raise {exc.__name__}", loc)
        # `range` with a step of zero ends here; a literal step folds this away.
        builder.call(builder.module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), ())), ())
        builder.unreachable()


class _TypingContext(typing.BaseContext):
    """A typing context for operators, casts, ranges, pointers and tuples only.

    It omits the builtins that Numba implements as overloads (`min`, `max`, `sum`, ...). Loading one of them loads the
    whole CPU target, which takes longer than all lowering.
    """

    def _load_builtins(self) -> None:
        if self._functions:
            return
        for template in builtin_registry.functions:
            if not hasattr(template, "_overload_func"):
                self.insert_function(template(self))
        for template in builtin_registry.attributes:
            if template.__module__ == "numba.core.typing.builtins":
                self.insert_attributes(template(self))
        for value, ty in builtin_registry.globals:
            if not any(hasattr(template, "_overload_func") for template in ty.templates):
                self._merge_global(value, ty)

    def resolve_value_type(self, val: Any) -> Any:
        """The type of a global. Classes such as `range` and `float` are looked up in the registry first.

        Numba would first check whether a class is one of its typed containers. That loads them and the CPU target.
        """
        known = self._lookup_global(val) if isinstance(val, type) else None
        return super().resolve_value_type(val) if known is None else known

    def _merge_global(self, value: Any, ty: Any) -> None:
        known = self._lookup_global(value)
        if known is not None:
            self._remove_global(value)
        self._insert_global(value, ty if known is None else known.augment(ty))


class _TargetContext(base.BaseContext):
    """A target context that lowers builtins only."""

    environment = None
    target_data = llvm.create_target_data(_DATA_LAYOUT)

    def load_additional_registries(self) -> None:
        from numba.cpython import builtins, numbers, rangeobj, tupleobj  # noqa: F401  registered by their import

        self.install_registry(_REGISTRY)

    @property
    def call_conv(self) -> _CConvention:
        return _CConvention(self)

    def codegen(self) -> None:
        return None

    def post_lowering(self, mod: Any, library: Any) -> None:
        _set_flags(mod, library.fastmath)


_REGISTRY = imputils.Registry("rlx loops")


# Numba's own versions omit `inbounds`. Without it LLVM adds run-time checks that addresses do not wrap.
@_REGISTRY.lower(operator.getitem, types.CPointer, types.Integer)
def _load_item(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.load(builder.gep(args[0], [args[1]], inbounds=True))


@_REGISTRY.lower(operator.setitem, types.CPointer, types.Integer, types.Any)
def _store_item(context: Any, builder: Any, sig: Any, args: Any) -> None:
    builder.store(args[2], builder.gep(args[0], [args[1]], inbounds=True))


def _set_flags(module: Any, flags: tuple[str, ...]) -> None:
    instructions = (i for f in module.functions for block in f.blocks for i in block.instructions)
    for instruction in instructions:
        if instruction.opname in _FLOAT_OPS:
            instruction.flags[:] = flags


class _Library:
    """Replaces Numba's code library: creates a module and keeps the one function that is lowered into it."""

    recorded_timings = None
    is_outlined = False

    def __init__(self, name: str, fastmath: tuple[str, ...]) -> None:
        self.name, self.fastmath, self.module = name, fastmath, None
        self._reload_init: set[Any] = set()

    def create_ir_module(self, name: str) -> Any:
        return ir.Module(self.name)

    def add_ir_module(self, module: Any) -> None:
        self.module = module


class _Lower(lowering.Lower):
    def __init__(self, context: Any, library: Any, fndesc: Any, func_ir: Any, metadata: Any = None) -> None:
        fndesc.mangled_name = library.name
        super().__init__(context, library, fndesc, func_ir, metadata)

    def emit_environment_object(self) -> None:
        pass  # holds Python globals and constants; loops have none


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPass(typed.NativeLowering):
    _name = "rlx_lowering"
    lowering_class = _Lower


_PASSES = (
    untyped.TranslateByteCode,
    untyped.FixupArgs,
    untyped.IRProcessing,
    untyped.RewriteSemanticConstants,
    untyped.DeadBranchPrune,
    untyped.GenericRewrites,  # constant indices into tuples
    untyped.ReconstructSSA,
    typed.NopythonTypeInference,
    typed.PreLowerStripPhis,
    _LowerPass,
)


class _Pipeline(compiler.CompilerBase):
    """Numba's pipeline without object mode, parallel loops, inlining, reference counting and the back end."""

    def define_pipelines(self) -> list[Any]:
        manager = PassManager("rlx")
        for step in _PASSES:
            manager.add_pass(step, step.__name__)
        manager.finalize()
        return [manager]


class Frontend:
    """The Numba contexts, and a cache of the functions lowered with them."""

    def __init__(self) -> None:
        self.typing = _TypingContext()
        self.target = _TargetContext(self.typing, "cpu")
        self.helpers: dict[tuple[Any, tuple[Any, ...]], _Text] = {}
        self.callees: list[list[_Text]] = []
        self.known: set[Any] = set()

    def lower(self, fn: Any, name: str, args: tuple[str, ...], fastmath: tuple[str, ...] = ()) -> str:
        """LLVM assembly of a module that defines `fn` as the C function `void name(args)`. Pointers do not overlap.

        Args:
            fastmath: LLVM's flags of the function's own float operations (see `SUM_FLAGS`).

        Raises:
            CompileError: the function uses something that Numba cannot type or that needs the Python runtime.
        """
        flags = _flags(noalias=True)
        with _LOCK:
            text = self._function(fn, tuple(map(_numba_type, args)), types.none, _Library(name, fastmath), flags)
        inner = [t.replace("define ", "define internal ", 1) for n, t in sorted(text.functions.items()) if n != name]
        return _keep_loops("\n".join([*sorted(text.declarations), *inner, text.functions[name]]))

    def _function(self, fn: Any, args: tuple[Any, ...], result: Any, library: _Library, flags: Any) -> _Text:
        self._register_callees(fn)
        self.callees.append([])
        try:
            lowered = compiler.compile_extra(
                self.typing, self.target, fn, args, result, flags, {}, library=library, pipeline_class=_Pipeline
            )
        except (NumbaError, NotImplementedError) as error:
            raise CompileError(str(error).strip(), where=f"loop kernel {fn.__name__}") from error
        finally:
            callees = self.callees.pop()
        return _assemble(library, typing.signature(lowered.fndesc.restype, *args), callees)

    def _register_callees(self, fn: Any) -> None:
        for callee in map(fn.__globals__.get, fn.__code__.co_names):
            if isinstance(callee, Primitive | python_types.FunctionType) and callee not in self.known:
                template = self._primitive(callee) if isinstance(callee, Primitive) else self._helper(callee)
                self.known.add(callee)
                self.typing.insert_global(callee, types.Function(template))

    def _primitive(self, primitive: Primitive) -> Any:
        args = tuple(map(_numba_type, primitive.args))
        case = typing.signature(_numba_type(primitive.result), *args)

        def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return primitive.llvm(builder, values)

        self.target.insert_func_defn([(build, primitive, args)])
        return type(primitive.name, (ConcreteTemplate,), {"key": primitive, "cases": [case]})

    def _helper(self, fn: Any) -> Any:
        """A template that lowers `fn` once for each combination of argument types in calls."""

        def generic(template: Any, args: Any, kws: Any) -> Any:
            text = self._helper_text(fn, tuple(map(types.unliteral, args)))
            if self.callees:
                self.callees[-1].append(text)
            return text.signature

        return type(fn.__name__, (AbstractTemplate,), {"key": fn, "generic": generic})

    def _helper_text(self, fn: Any, args: tuple[Any, ...]) -> _Text:
        if (fn, args) not in self.helpers:
            name = f"{fn.__name__}({', '.join(map(_type_name, args))})"
            library = _Library(name, getattr(fn, "fastmath", ()))
            library.is_outlined = hasattr(fn, "outlined")
            text = self._function(fn, args, None, library, _flags(forceinline=not library.is_outlined))
            self.target.insert_func_defn([(_call(name, text.signature), fn, args)])
            self.helpers[fn, args] = text
        return self.helpers[fn, args]


def _flags(**changes: bool) -> Any:
    flags = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.nrt = "numpy", False
    for name, value in changes.items():
        setattr(flags, name, value)
    return flags


def _call(name: str, signature: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        ftype = context.call_conv.get_function_type(signature.return_type, signature.args)
        callee = builder.module.globals.get(name) or ir.Function(builder.module, ftype, name)
        return builder.call(callee, values)

    return build


def _assemble(library: _Library, signature: Any, callees: list[_Text]) -> _Text:
    """Splits the printed module into its definition and declarations. Declarations of Python callees are dropped."""
    text = _Text(library.name, signature)
    for callee in callees:
        text.declarations |= callee.declarations
        for name, body in callee.functions.items():
            if text.functions.setdefault(name, body) != body:
                raise CompileError("two helpers have this name and argument types", where=name, hint="Rename one.")
    for function in library.module.functions:
        if not function.is_declaration:
            if library.is_outlined:
                function.attributes.add("noinline")
            # Branch weights refer to numbered metadata of the module; they only guard the step of `range`.
            text.functions[library.name] = re.sub(r", !prof !\d+", "", str(function))
        elif function.name not in text.functions:
            text.declarations.add(str(function))
    return text


def _keep_loops(text: str) -> str:
    """Disables unrolling of loops. LLVM would unroll a loop over the 32 elements of a block before it vectorizes it.

    Numba names a basic block by its bytecode offset, such as `B38`, or `B38.endif` when lowering splits it. A branch to
    the same or a lower offset is the back edge of a loop.
    """
    lines = text.split("\n")
    ids: dict[tuple[int, int], int] = {}  # one per loop, also if it has several back edges
    function, at = 0, -1
    for i, line in enumerate(lines):
        if line.startswith("define"):
            function, at = i, -1
        elif label := _LABEL.match(line):
            at = int(label[1])
        elif line.startswith("  br "):
            for target in [int(t) for t in _TARGET.findall(line) if int(t) <= at]:
                lines[i] = f"{line}, !llvm.loop !{ids.setdefault((function, target), 2 * len(ids))}"
    nodes = [f'!{n} = distinct !{{!{n}, !{n + 1}}}\n!{n + 1} = !{{!"llvm.loop.unroll.disable"}}' for n in ids.values()]
    return "\n".join([*lines, *nodes]) + "\n"


FRONTEND = Frontend()
