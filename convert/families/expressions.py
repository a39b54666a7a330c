"""The small arithmetic that family files use for shapes and conditions, such as ``num_key_value_heads * head_dim``.

A subset of Python's expressions: names, literals, arithmetic, comparisons, ``and``/``or``/``not``, ``a if c else b``
and indexing, compiled once each. A string in a family file is an expression; any other JSON value stands for itself.
"""

import ast
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

_ALLOWED = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.Subscript, ast.And, ast.Or, ast.Not, ast.USub),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot, ast.In, ast.NotIn),
)
_NO_BUILTINS: dict[str, Any] = {"__builtins__": {}}


def evaluate(expression: Any, scope: Mapping[str, Any]) -> Any:
    """The value of ``expression`` with the names of ``scope``; anything but a string is returned as it is.

    Raises ``ValueError`` for what is not allowed in family-file expressions and ``NameError`` for an unknown name.
    """
    return eval(_compiled(expression), _NO_BUILTINS, scope) if isinstance(expression, str) else expression


def names(expression: Any) -> frozenset[str]:
    """The names that ``expression`` refers to. Raises ``ValueError`` for what family files may not use."""
    return frozenset(_compiled(expression).co_names) if isinstance(expression, str) else frozenset()


@cache  # family files hold a few hundred
def _compiled(text: str) -> CodeType:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression: {error.msg}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"{text!r}: {type(node).__name__} is not allowed in family-file expressions")
    return compile(tree, text, "eval")
