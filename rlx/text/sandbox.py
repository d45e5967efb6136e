"""The Jinja environment of chat templates: the dialect that models are published with, inside a sandbox with a budget.

Text stage, used by `chat.py`; the only module that imports jinja2. The dialect is that of `transformers`: blocks
swallow the newline after them and the blanks before them, loops can `break` and `continue`, `tojson` does not escape
HTML, and there are `raise_exception`, `strftime_now` and the `generation` tag.

jinja2's sandbox keeps a template away from Python's internals but bounds neither time nor memory. Here every loop,
operator, call, filter and test is charged to a `Budget` before it runs. Loops, comparisons, slices and `~` are
not interceptable in jinja2, so they are rewritten to filters in the syntax tree, whose private names begin with `_`.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import islice
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rlx.errors import ChatTemplateError
from rlx.text import budget as cost
from rlx.text.budget import BUDGET

_OPERATORS = frozenset({"+", "-", "*", "/", "//", "%", "**"})
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, frozenset(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
        "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
        "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper".split()
    )),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, frozenset({"copy", "count", "index"})),
    (tuple, frozenset({"count", "index"})),
    ((int, float, bytes, range), frozenset()),
)  # fmt: skip
_METHOD_COSTS: dict[str, Callable[..., None]] = {
    "replace": cost.replaced, "strip": cost.stripped, "lstrip": cost.stripped, "rstrip": cost.stripped,
}  # fmt: skip
_FILTERS_BY_ITEM = (
    "abs count d default first float last length list items map reject rejectattr reverse select selectattr"
)
_FILTERS_BY_TREE = "dictsort groupby max min sort unique"
_FILTERS_OF_TEXT = "capitalize e escape forceescape lower safe string truncate upper"
_SLOW_FILTERS_OF_TEXT = "title wordcount"  # these look at each word in Python


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment; rendering in it needs a `Budget` in `BUDGET`."""

    intercepted_binops = _OPERATORS

    def __init__(self, most_tokens: int) -> None:
        extensions = [LoopControlExtension, GenerationTag]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize)
        self.globals = {
            "range": safe_range,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = _filters()
        self.tests = {name: _charged_test(test) for name, test in TESTS.items()}
        self._most_tokens = most_tokens

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(list(islice(self.lex(source), self._most_tokens + 1))) > self._most_tokens:
            raise ChatTemplateError(f"it has more than {self._most_tokens} words and signs", where="chat template")
        tree: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of the built-in types, only the methods listed here; of other objects what jinja2 allows."""
        for kind, allowed in _METHODS:
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of bounds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if not isinstance(left, Undefined) and not isinstance(right, Undefined):  # those name what is missing
            cost.arithmetic(BUDGET.get(), operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, charged."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def charged(*args: Any, **kwargs: Any) -> str:
            cost.brace_formatted(BUDGET.get(), value.__self__, [*args, *kwargs.values()])
            return formatted(*args, **kwargs)

        return charged

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method, charged for what it reads and makes."""
        budget = BUDGET.get()
        budget.spend(4)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | list | tuple | dict | LoopContext) or obj is dict:
            named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # jinja2 adds its own
            args = _charge_method(obj, owner, args, named)
        elif isinstance(obj, LoopContext):  # a recursive loop goes down
            args = (budget.counted(args[0]), *args[1:])
        result = super().call(context, obj, *args, **kwargs)
        budget.shallow(result)
        return result


def _charge_method(obj: Any, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    budget = BUDGET.get()
    budget.shallow(owner)
    for value in (*args, *kwargs.values()):
        budget.deep(value)
    if isinstance(owner, str) and obj.__name__ == "join":
        args = (budget.collect(*args),)
        cost.joined(budget, owner, args[0])
    elif isinstance(owner, str) and obj.__name__ in _METHOD_COSTS:
        _METHOD_COSTS[obj.__name__](budget, owner, *args, **kwargs)
    return args


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Charge every value that is printed. (`pass_context` keeps jinja2 from doing it while compiling.)"""
    if isinstance(value, str):
        BUDGET.get().text(len(value))
    else:
        BUDGET.get().deep(value, printing=True)
    return value


def _raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(f"the template refuses the conversation: {_text(message)}", where="chat template")


def _strftime_now(form: str) -> str:
    """The local time; templates put the date into the system message."""
    cost.stripped(BUDGET.get(), "", form)
    return datetime.now().strftime(form)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model says, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Charging(NodeTransformer):
    """Puts the charging filters into a template's tree, and refuses what chat templates have no use for."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Filter:
        self.generic_visit(node)
        values: list[nodes.Expr] = [node.expr, *(operand.expr for operand in node.ops)]
        signs = nodes.Const(" ".join(operand.op for operand in node.ops), lineno=node.lineno)
        return _filter(nodes.Tuple(values, "load", lineno=node.lineno), "_compare", signs)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, "_read")
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _filter(node.arg, "_read")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(node.key, "_read")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_charged_text(part) if isinstance(part, nodes.TemplateData) else part for part in node.nodes]
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, int):
            cost.whole_number(node.value.bit_length())
        return node

    def _refuse(self, node: nodes.Node) -> NoReturn:
        raise ChatTemplateError(
            f"{type(node).__name__} is not for chat templates", where=f"chat template, line {node.lineno}"
        )

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = _refuse


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _charged_text(data: nodes.TemplateData) -> nodes.Expr:
    """Static text in a loop adds up as well; short pieces are covered by the step of their iteration."""
    if len(data.data) < 64:
        return data
    return _filter(nodes.Const(data.data, lineno=data.lineno), "_read")


def _counted(values: Any) -> Any:
    return BUDGET.get().counted(values)


def _concat(values: list[Any]) -> str:
    cost.joined(BUDGET.get(), "", values)
    return "".join(map(str, values))


def _contains(value: Any, container: Any) -> bool:
    return bool(value in container)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge, "in": _contains, "notin": lambda value, container: value not in container,
}  # fmt: skip


def _compare(values: tuple[Any, ...], signs: str) -> Any:
    result: Any = True
    for sign, left, right in zip(signs.split(), values, values[1:], strict=False):
        BUDGET.get().compare(left, right)
        result = _COMPARISONS[sign](left, right)
        if not result:
            break
    return result


def _read(value: Any) -> Any:
    """Charge a value that is sliced, or that is a key (a tuple's hash visits all of it)."""
    if isinstance(value, tuple):
        BUDGET.get().deep(value)
    else:
        BUDGET.get().shallow(value)
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    cost.serialized(BUDGET.get(), value, indent, separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _text(value: Any) -> str:
    """The text of any value, charged."""
    if not isinstance(value, str):
        BUDGET.get().deep(value, printing=True)
    return str(value)


def _charge_text(value: Any, *_: Any, **__: Any) -> None:
    BUDGET.get().text(len(_text(value)))


def _charge_words(value: Any) -> None:
    BUDGET.get().spend(len(_text(value)))


def _charge_replace(value: Any, old: Any, new: Any, count: int | None = None) -> None:
    cost.replaced(BUDGET.get(), _text(value), _text(old), _text(new), -1 if count is None else count)


def _charge_indent(value: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    cost.indented(BUDGET.get(), _text(value), width)


def _charge_trim(value: Any, chars: str | None = None) -> None:
    cost.stripped(BUDGET.get(), _text(value), chars)


def _charge_format(value: Any, *args: Any, **kwargs: Any) -> None:
    cost.percent_formatted(BUDGET.get(), _text(value), [*args, *kwargs.values()])


def _charge_round(value: Any, precision: int = 0, *_: Any, **__: Any) -> None:
    cost.rounded(precision)


def _charge_int(value: Any, *_: Any, **__: Any) -> None:
    cost.parsed_int(value)


def _charge_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    BUDGET.get().shallow(value)
    if not isinstance(start, int | float):  # summing lists copies the first one for each of the others
        raise ChatTemplateError("only numbers can be summed", where="chat template")


def _charge_tree(value: Any, *args: Any, **kwargs: Any) -> None:
    for part in (value, *args, *kwargs.values()):
        BUDGET.get().deep(part)


def _charge_items(value: Any, *args: Any, **kwargs: Any) -> None:
    for part in (value, *args, *kwargs.values()):
        BUDGET.get().shallow(part)


def _filters() -> dict[str, Callable[..., Any]]:
    """The filters of jinja2 that chat templates use, charged, and the private ones of `_Charging`."""
    charges: dict[str, Callable[..., None]] = {
        **dict.fromkeys(_FILTERS_BY_ITEM.split(), _charge_items),
        **dict.fromkeys(_FILTERS_BY_TREE.split(), _charge_tree),
        **dict.fromkeys(_FILTERS_OF_TEXT.split(), _charge_text),
        **dict.fromkeys(_SLOW_FILTERS_OF_TEXT.split(), _charge_words),
        "replace": _charge_replace, "indent": _charge_indent, "trim": _charge_trim, "format": _charge_format,
        "round": _charge_round, "int": _charge_int, "sum": _charge_sum,
    }  # fmt: skip
    own: tuple[Callable[..., Any], ...] = (_counted, _concat, _compare, _read)
    private = {function.__name__: _at_run_time(function) for function in own}
    public = {name: _charged(FILTERS[name], charge) for name, charge in charges.items()}
    return private | public | {"tojson": _at_run_time(_tojson), "join": _join}


def _at_run_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, never evaluated while a template is compiled, where there is no budget."""

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    values = BUDGET.get().collect(values)
    cost.joined(BUDGET.get(), _text(d), values)
    return str(FILTERS["join"](context.eval_ctx, values, d, attribute))


def _charged(function: Callable[..., Any], charge: Callable[..., None]) -> Callable[..., Any]:
    first = _first_argument(function)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        charge(value, *args, **kwargs)
        result = function(*first(context), value, *args, **kwargs)
        BUDGET.get().shallow(result)
        return result

    return run


def _first_argument(function: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """What jinja2 puts before the value: nothing, or the object that the function's decorator asks for."""
    asked = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    arguments: dict[str | None, Callable[[Context], tuple[Any, ...]]] = {
        None: lambda context: (),
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }
    return arguments[asked]


_TESTS_OF_TEXT = (TESTS["lower"], TESTS["upper"])


def _charged_test(test: Any) -> Callable[..., Any]:
    first = _first_argument(test)

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        for other in (*args, *kwargs.values()):
            BUDGET.get().compare(value, other)
        if test in _TESTS_OF_TEXT:
            _charge_text(value)
        BUDGET.get().shallow(value)
        return test(*first(context), value, *args, **kwargs)

    return run
