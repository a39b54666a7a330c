"""The small arithmetic that family files use for shapes and conditions, such as ``num_key_value_heads * head_dim``.

A subset of Python's expressions, read with ``ast`` and never executed as code: names, literals, arithmetic,
comparisons, ``and``/``or``/``not``, ``a if c else b`` and indexing. A string in a family file is an expression; any
other JSON value stands for itself.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(expression: Any, scope: Mapping[str, Any]) -> Any:
    """The value of ``expression`` with the names of ``scope``; anything but a string is returned as it is."""
    return _value(_parse(expression), scope) if isinstance(expression, str) else expression


def names(expression: Any) -> frozenset[str]:
    """The names that ``expression`` refers to. Raises ``ValueError`` for what the language does not have."""
    if not isinstance(expression, str):
        return frozenset()
    try:
        tree = _parse(expression)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression: {error.msg}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"{expression!r}: {type(node).__name__} is not part of the language of family files")
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


_ALLOWED = (
    *(ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript),
    *(ast.Load, ast.And, ast.Or),
    *_BINARY,
    *_COMPARE,
    *_UNARY,
)


def _value(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return scope[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, scope), _value(right, scope))
        case ast.UnaryOp(op=op_, operand=operand):
            return _UNARY[type(op_)](_value(operand, scope))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, scope) else orelse, scope)
        case ast.Subscript(value=container, slice=index):
            return _value(container, scope)[_value(index, scope)]
        case ast.BoolOp():
            return _boolean(node, scope)
        case ast.Compare():
            return _comparison(node, scope)
    raise ValueError(f"{type(node).__name__} is not part of the language of family files")


def _boolean(node: ast.BoolOp, scope: Mapping[str, Any]) -> Any:
    stop_at = isinstance(node.op, ast.Or)
    value: Any = None
    for item in node.values:
        value = _value(item, scope)
        if bool(value) is stop_at:
            break
    return value


def _comparison(node: ast.Compare, scope: Mapping[str, Any]) -> bool:
    left = _value(node.left, scope)
    for op, item in zip(node.ops, node.comparators, strict=True):
        right = _value(item, scope)
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True
