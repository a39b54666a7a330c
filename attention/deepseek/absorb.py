"""``absorb(model)``: a loaded DeepSeek, Youtu or Mistral4 model decodes over its latent cache, in plain transformers.

Stock transformers expands every cached token into every head's keys and values at every step, ``S H (Dn + Dv) R``
multiplications a layer. After ``absorb`` a decoding step attends over the cached latents themselves
(``kvfold.attention.absorbed``); prefill and training go on as before. Weights, state dict and the cache's layout
(normed latent, rotated key: what transformers itself caches for this class) stay as they are, so a cache begun by one
form can be continued by the other, ``generate``, ``save_pretrained`` and ``torch.compile`` work unchanged, and
``unabsorb`` undoes it.

    from kvfold.attention import absorb
    model = absorb(AutoModelForCausalLM.from_pretrained(folder))
"""

from types import MethodType
from typing import TypeVar

from torch import nn

from kvfold.attention.deepseek.modules import FORMS

Model = TypeVar("Model", bound=nn.Module)
_STOCK = {absorbed: stock for stock, absorbed in FORMS.items()}


def absorb(model: Model) -> Model:
    """Swap the attention of every DeepSeek-V2/V3, Youtu and Mistral4 layer in ``model``, in place; returns ``model``.

    Absorbing twice changes nothing. Raises ValueError when ``model`` has no such attention.
    """
    layers = [module for module in model.modules() if type(module) in FORMS or type(module) in _STOCK]
    if not layers:
        names = ", ".join(stock.__name__ for stock in FORMS)
        raise ValueError(
            f"model: expected latent attention of transformers' own classes ({names}), found none in "
            f"{type(model).__name__}; convert a checkpoint with `kvfold convert MODEL OUT --to mla`"
        )
    for module in layers:
        _become(module, FORMS.get(type(module), type(module)))
    return model


def unabsorb(model: Model) -> Model:
    """Give every absorbed layer of ``model`` its stock attention back, in place; returns ``model``."""
    for module in model.modules():
        if type(module) in _STOCK:
            _become(module, _STOCK[type(module)])
    return model


def _become(module: nn.Module, form: type[nn.Module]) -> None:
    """Change a module's class; accelerate's hooks (``device_map``) keep the forward they wrap as a bound method."""
    module.__class__ = form
    for name in ("_old_forward", "forward"):
        bound = module.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__self__ is module:
            module.__dict__[name] = MethodType(form.forward, module)
