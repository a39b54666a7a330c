"""The values of a config.json by their names in a family file, and the expressions over them.

An expression is a string in a family file, such as ``num_key_value_heads * head_dim``, in a subset
of Python (names, literals, arithmetic, comparisons, ``and``/``or``/``not``, ``a if c else b``,
indexing). Any other JSON value stands for itself.
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.schema import ABSENT, Family

_ALLOWED = (
    ast.Expression,
    ast.Name,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.Subscript,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)


def evaluate_expression(expression: Any, scope: "ConfigValues | Mapping[str, Any]") -> Any:
    """The value of ``expression`` with the names in ``scope``; anything but a string is returned
    unchanged.

    Raises ``InputError`` if the values of a config do not allow it (a division by zero, arithmetic
    with text, a list with too few entries), ``ValueError`` for syntax not allowed in family files,
    and ``NameError`` for an unknown name.
    """
    if not isinstance(expression, str):
        return expression
    code = _compile_expression(expression)
    try:
        # Safe: _compile_expression lets neither calls nor attributes through, and there are no
        # builtins.
        return eval(code, {"__builtins__": {}}, scope)  # type: ignore[arg-type]  # it needs no more of it
    except (ArithmeticError, IndexError, TypeError) as error:
        raise InputError(
            f"config.json: {expression} cannot be computed ({error}); correct these keys"
        ) from None


@cache  # unbounded: family files hold a few hundred
def _compile_expression(text: str) -> CodeType:
    """The code object of an expression. Raises ValueError for syntax that family files may not
    contain, such as calls.
    """
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(
                f"{text!r}: {type(node).__name__} is not allowed in family-file expressions"
            )
    return compile(tree, text, "eval")


def is_finite_number(value: Any) -> bool:
    """True if ``value`` is a finite int or float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# JSON has one kind of number and Python's bool is an int, so a flag must be kept from passing as a
# size: type(), not isinstance().
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # of keys: in words, and the check
    "size": ("a positive whole number", lambda value: type(value) is int and value > 0),
    "count": ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    "number": ("a number", is_finite_number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a string", lambda value: isinstance(value, str)),
    "pattern": ("a whole number or a string", lambda value: type(value) in (int, str)),
    "counts": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and {*map(type, value)} <= {int},
    ),
    "texts": (
        "a list of strings",
        lambda value: isinstance(value, list) and {*map(type, value)} <= {str},
    ),
}


@dataclass(frozen=True, eq=False)
class ConfigValues:
    """The values of a config by their names in the family file, with defaults filled in, and
    further ``names`` such as ``layer``.

    A value is read and checked on first use, so an invalid key is an error only for callers that
    need it.
    """

    family: Family
    config: Mapping[str, Any]
    names: Mapping[str, Any] = field(default_factory=dict)

    def find_config_key(self, name: str) -> tuple[str, Any]:
        """The key and value in the config for ``name``, which may be an alias; the value is ABSENT
        if the config has no such key.
        """
        for key in (name, *self.family.config[name].aliases):
            outer, _, inner = key.partition(".")  # of a key in a table of the config
            value = self.config.get(outer, ABSENT)
            if inner:
                value = value.get(inner, ABSENT) if isinstance(value, Mapping) else ABSENT
            if value is not ABSENT:
                return key, value
        return name, ABSENT

    def __getitem__(self, name: str) -> Any:
        """The value of ``name``. Raises InputError if the config's key is missing or has the wrong
        type.
        """
        if name in self.names:
            return self.names[name]
        key = self.family.config[name]
        key_in_file, value = self.find_config_key(name)
        expected_type, fits = TYPES[key.type]
        # A default is for missing keys alone: null is what a config says, and not every class reads
        # it as its default.
        if value is ABSENT and key.default is not ABSENT:
            return key.default
        if value is None and key.nullable:
            return None
        if value in (ABSENT, None) and key.otherwise is not ABSENT:
            return evaluate_expression(key.otherwise, self)
        if not fits(value):
            actual_value = "missing" if value is ABSENT else repr(value)
            raise InputError(
                f"config.json: {key_in_file} must be {expected_type} for model_type"
                f" {self.family.model_type!r}, but it is {actual_value}"
            )
        if key.per_layer:
            layers = evaluate_expression(self.family.sizes.layers, self)
            if len(value) != layers:
                raise InputError(
                    f"config.json: {key_in_file} must have {layers} entries, one per layer, but it"
                    f" has {len(value)}"
                )
        return value
