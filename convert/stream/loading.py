"""A whole checkpoint in memory, as transformers loads it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, one_line


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """A causal language model, or the wrapper of one, in ``dtype``. Raises InputError when it cannot be loaded."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from kvfold.convert.stream.skeleton import auto_class

    with _loading(checkpoint):
        classes = auto_class(checkpoint.config)
        if checkpoint.made_of:  # the files hold something else than the model's tensors
            config = CONFIG_MAPPING[checkpoint.config["model_type"]].from_dict(checkpoint.config)
            tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
            model = classes._model_mapping[type(config)]
            return model.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
        return classes.from_pretrained(checkpoint.folder, dtype=dtype, trust_remote_code=trust_remote_code)


def load_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The config of the language model. Raises InputError when transformers cannot load it."""
    from transformers import AutoConfig

    with _loading(checkpoint):
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code).get_text_config()


@contextmanager
def _loading(checkpoint: Checkpoint) -> Iterator[None]:
    from kvfold.attention.checkpoints.registered import register_model

    register_model(str(checkpoint.config.get("model_type")))
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(
            f"{checkpoint.origin}: expected a model that transformers can load, found: {one_line(error)[:200]}"
        ) from error


def hide_bars(quiet: bool) -> None:
    """Show the progress bars of transformers on a terminal only."""
    if quiet or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
