"""Build stock transformers models: without weights on the meta device, or loaded completely."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvfold.attention.cache_rounding import CacheRoundingError
from kvfold.attention.checkpoints.registered import register_model
from kvfold.attention.interface import BLOCKWISE
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.errors import InputError, KvfoldError, explain_system_error, summarize_error
from kvfold.convert.families.family import WRAPPERS

# transformers 5.23 ships Mistral4ForCausalLM, but AutoModelForCausalLM does not know it yet;
# `register` of 5.17 ignores its own configs.
if "mistral4" in CONFIG_MAPPING and "mistral4" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
    from transformers import Mistral4ForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[CONFIG_MAPPING["mistral4"]] = (
        Mistral4ForCausalLM
    )


def choose_auto_class(config: dict[str, Any]) -> Any:
    """Return the transformers Auto class that loads a model with this ``config``:
    AutoModelForCausalLM, or AutoModelForImageTextToText for multimodal models.
    """
    register_model(str(config.get("model_type")))
    return (
        AutoModelForImageTextToText
        if config.get("model_type") in WRAPPERS
        else AutoModelForCausalLM
    )


def build_empty_model(
    config: dict[str, Any], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Any:
    """Build the stock transformers model of ``config`` without weights: its parameters are on the
    meta device and use no memory.

    Only buffers that no checkpoint stores get values, on ``device``. If transformers cannot build
    the model, raises InputError with the key of config.json that is at fault.
    """
    device = torch.device(device)
    with errors_as_input_errors():
        try:
            return _build_on_meta(config, dtype, device)
        except InputError:
            raise
        except Exception as error:
            key = _find_invalid_key(config, dtype, device)
            if key is None:
                raise
            raise InputError(
                f"config.json: {key} must be a value that a {config.get('model_type')} model"
                f" supports, not {config[key]!r} ({describe_error(error)}); use the config.json"
                " that came with the weights"
            ) from error


def _find_invalid_key(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return the first key of ``config`` that makes transformers fail: without this key, the model
    can be built. None if there is no such key.

    Some errors of transformers name the key ("Validation error for field 'vocab_size'"), but many
    only the value (KeyError 'x').
    """
    for key in config:
        if key == "model_type":
            continue
        others = {name: value for name, value in config.items() if name != key}
        with suppress(Exception):
            _build_on_meta(others, dtype, device)
            return key
    return None


def _build_on_meta(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Build the stock model of ``config`` with its parameters on the meta device, and its rotary
    tables and other buffers on ``device``.
    """
    model_type = config.get("model_type")
    auto = choose_auto_class(config)
    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: the installed transformers does not support model_type {model_type!r};"
            " upgrade transformers, or choose another model"
        )
    hf_config = CONFIG_MAPPING[model_type].from_dict(
        {key: value for key, value in config.items() if key != "auto_map"}
    )
    # A training loss, computed from what all layers return.
    hf_config.output_router_logits = False
    stock = auto._model_mapping[type(hf_config)]
    attention = BLOCKWISE
    if not stock._supports_attention_backend:  # as bloom, which computes its own
        attention = "sdpa" if stock._supports_sdpa else "eager"
    with torch.device("meta"):
        # torch's grouped matrix product, which experts use by default, has no float64
        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        model = auto.from_config(hf_config, dtype=dtype, attn_implementation=attention, **experts)
    # It only concerns gradients, and must lie inside a table of which few rows are loaded.
    model.get_input_embeddings().padding_idx = None
    # Buffers that no checkpoint holds (rotary frequencies, embedding scales) get their values from
    # _init_weights, as in loading; what that does to parameters has no effect on the meta device.
    # accelerate.init_empty_weights makes the same values, but allocates every parameter before it
    # drops it: an embedding table of 4 GB, or all experts of a layer, must then fit in memory.
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        pending = [
            (name, buffer)
            for name, buffer in module.named_buffers(recurse=False)
            if f"{path}.{name}".lstrip(".") not in stored
        ]
        for name, buffer in pending:
            setattr(module, name, torch.empty_like(buffer, device=device))
        if pending:
            model._init_weights(module)
    return model.eval().requires_grad_(False)


def use_blockwise_attention(model: Any, device: torch.device) -> None:
    """Make a loaded ``model`` on a CPU compute attention in blocks of queries, which saves memory,
    unless its class does not support that.
    """
    # torch has no fused kernel for values narrower than keys, as in MLA: it computes and keeps
    # whole maps. With blocks the passes over 1 x 1024 tokens of SmolLM2-135M, MLA 128+64, and its
    # teacher take 11.3 s instead of 16.8 s in training (measured by a script in git history, one
    # thread of an AMD EPYC, 2026-11-26).
    if (
        device.type == "cpu"
        and model.config._attn_implementation == "sdpa"
        and model._supports_attention_backend
    ):
        # The model's own method refuses classes whose files do not spell the call as transformers
        # does.
        model.config._attn_implementation = BLOCKWISE


class ModelHead:
    """The output head of a loaded ``model``, for a block of tokens at a time; the class itself
    computes the logits of all tokens at once.

    ``vocabulary`` is the size of its logits.
    """

    def __init__(self, model: Any) -> None:
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self._decoder = model.get_decoder()
        self._forward = model.forward
        self._output: Any = None

    def compute_states(self, tokens: Tensor) -> Tensor:
        """Return the decoder's output ``[B, T, E]`` for ``tokens [B, T]``."""
        run_decoder = self._decoder.forward
        states = torch.empty(0)

        def run_and_shorten(*args: Any, **kwargs: Any) -> Any:
            """Run the decoder, and return only its output for the first token to the head."""
            nonlocal states
            self._output = run_decoder(*args, **kwargs)
            states = self._output.last_hidden_state
            self._output.last_hidden_state = states[:, :1]
            return self._output

        self._run_model(run_and_shorten, tokens)
        return states

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[B, t, V]`` for ``hidden [B, t, E]``, some of the states of the last
        call of `compute_states`.
        """

        def return_hidden(*args: Any, **kwargs: Any) -> Any:
            """Run in place of the decoder: return an output whose last states are ``hidden``."""
            self._output.last_hidden_state = hidden
            return self._output

        blank = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        logits: Tensor = self._run_model(return_hidden, blank).logits
        return logits

    def _run_model(self, run_decoder: Callable[..., Any], tokens: Tensor) -> Any:
        """Return the model's output for ``tokens`` with another forward pass of its decoder."""
        forward = self._decoder.forward
        self._decoder.forward = run_decoder
        try:
            return self._forward(input_ids=tokens, use_cache=False)
        finally:
            self._decoder.forward = forward


def describe_error(error: Exception) -> str:
    """Return the type of another library's error and the beginning of its message."""
    return f"{type(error).__name__}: {summarize_error(error)}"


@contextmanager
def errors_as_input_errors(where: str = "config.json") -> Iterator[None]:
    """Raise errors of transformers in the with-block as InputErrors about ``where``, because only a
    wrong config can cause them there.
    """
    try:
        yield
    except KvfoldError:
        raise
    except CacheRoundingError as error:
        raise InputError(f"--cache {error}") from error
    except Exception as error:
        if explain_system_error(error) or "CUDA" in str(error):  # of the memory or the device
            raise
        raise InputError(
            f"{where}: transformers cannot build or run this model ({describe_error(error)});"
            " correct the config, or fetch it again"
        ) from error


def load_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """Load the config of the checkpoint's language model as a transformers config object. Raises
    InputError if transformers cannot load it.
    """
    register_model(str(checkpoint.config.get("model_type")))
    with errors_as_input_errors(checkpoint.origin):
        return AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code
        ).get_text_config()


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """A context manager in which transformers shows no progress bars of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
