"""How engines round their KV cache: bits and words. Does not import torch."""

# Numbers that share a scale and a zero of 16 bits each.
GROUP = 32
# Bits of a cached number by how an engine rounds it (`cache_rounding`), with its share of these.
CACHE_BITS = {"fp8": 8, "int8": 9, "int4": 5, "int3": 4, "int2": 3}


def find_rounding_problem(rounding: str, channels: int) -> str | None:
    """Return why ``rounding`` cannot round values or latents of ``channels`` numbers per token, in
    words; None if it can.
    """
    if rounding == "fp8" or channels % GROUP == 0:
        return None
    return (
        f"{rounding} rounds groups of {GROUP} channels, which do not divide the {channels} of a"
        " token in this model; use fp8"
    )


def describe_cache_rounding(rounding: str) -> str:
    """Return how ``rounding``, a key of `CACHE_BITS`, rounds a cache, in words."""
    scheme = "e4m3 with scale 1"
    if rounding != "fp8":
        scheme = (
            "groups of 32 tokens of a channel for keys, of 32 channels of a token for values and"
            " latents, with a scale and a zero of 16 bits each"
        )
    return f"{rounding}, simulated: {scheme}"
