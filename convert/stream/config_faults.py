"""Which key of a config.json is why transformers cannot build a model of it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvfold.convert.errors import InputError

Built = TypeVar("Built")
_LONGEST = 200  # characters of somebody else's error text


def build_checked(config: dict[str, Any], build: Callable[[dict[str, Any]], Built]) -> Built:
    """``build(config)``. Raises InputError that names the key at fault when transformers' classes refuse it.

    They raise whatever the line raises that stumbles over the value, so the key is found by trying: it is the one
    without which, the class's default in its place, a model can be built.
    """
    try:
        return build(config)
    except InputError:
        raise
    except Exception as error:
        key = next((key for key in config if key != "model_type" and _builds(build, config, key)), None)
        if key is None and isinstance(error, RuntimeError):  # torch's own troubles, as no memory on a device
            raise
        raise InputError(_message(config, key, error)) from error


def _builds(build: Callable[[dict[str, Any]], object], config: Mapping[str, Any], key: str) -> bool:
    try:
        build({name: value for name, value in config.items() if name != key})
    except Exception:
        return False
    return True


def unusable(error: Exception) -> str:
    """What to tell when nobody knows which key was at fault for ``error``."""
    return f"config.json: expected one that transformers can build and run a model of, found: {_reason(error)}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]


def _message(config: Mapping[str, Any], key: str | None, error: Exception) -> str:
    if key is None:
        return unusable(error)
    expected = _activations() if "act" in key.split("_") else f"a value that a {config.get('model_type')} model takes"
    return f"config.json: {key} must be {expected}, found {config[key]!r} ({_reason(error)})"


def _activations() -> str:
    from transformers.activations import ACT2FN

    known = [name for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2") if name in ACT2FN]
    return f"an activation that transformers knows, such as {', '.join(known)}"
