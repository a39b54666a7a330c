"""The identifiers that the hub takes in a card's ``license`` field; it refuses a card with any other.

huggingface_hub has no list of them and asks the server. These are those of the hub's documentation ("Licenses") in
2026; the hub adds some from time to time, which until then become ``other`` with their name in ``license_name``.
"""

import re
from typing import Any

_OTHER = "other"
_LISTED = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community
h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail openrail++ osl-3.0 other
pddl postgresql unknown unlicense wtfpl zlib
"""
LICENSES = frozenset(_LISTED.split())


def license_fields(known: dict[str, Any]) -> dict[str, str | list[str] | None]:
    """``license``, ``license_name`` and ``license_link`` of a source's card ``known``, as the hub takes them.

    An identifier in another spelling is set right ("Apache 2.0"); one that the hub does not know becomes ``other``,
    with its own words as the name. What is no text is left out.
    """
    given = known.get("license")
    texts = [text for text in (given if isinstance(given, list) else [given]) if isinstance(text, str)]
    taken = [_identifier(text) for text in texts]
    strange = [text for text, name in zip(texts, taken, strict=True) if name == _OTHER and text.lower() != _OTHER]
    name, link = (
        value if isinstance(value, str) else None for value in map(known.get, ("license_name", "license_link"))
    )
    if name is None and strange:
        name = _slug(strange[0])
    return {
        "license": list(dict.fromkeys(taken)) if isinstance(given, list) and taken else next(iter(taken), None),
        "license_name": name,
        "license_link": link,
    }


def _identifier(text: str) -> str:
    return next((name for name in (text.lower(), _slug(text)) if name in LICENSES), _OTHER)


def _slug(text: str) -> str:
    """Letters, digits, dots and hyphens, as ``license_name`` takes them."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "unnamed"
