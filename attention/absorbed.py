"""Absorption: the up-projections of latent attention moved to the query and output side (DeepSeek-V2 2024, sec. 2.1.2).

Shapes: ``W_q [H, Dn, E]``, ``W_uk [H, Dn, R]``, ``W_uv [H, Dv, R]``, ``W_o [E, H, Dv]``. Since

    score = (W_q,h x_t) . (W_uk,h c_s) = (W_uk,h^T W_q,h x_t) . c_s
    output = sum_h W_o,h sum_s a_hts W_uv,h c_s = sum_h (W_o,h W_uv,h) sum_s a_hts c_s

attention runs over the cached latent ``c [B, S, R]`` itself. The products are kept as factors, because multiplying them
out makes ``W_q`` larger by ``R / Dn`` and ``W_o`` by ``R / Dv``, and a decoding step has to read them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.checks import expect_alike, expect_shape


@dataclass(frozen=True)
class AbsorbedProjections:
    """The four weights as two chains: ``x -> W_q -> W_uk^T`` before attention, ``W_uv -> W_o`` after it.

    ``query [H, Dn, E]`` and ``query_up [H, Dn, R]``; ``value_up [H, Dv, R]`` and ``output [E, H, Dv]``.
    """

    query: Tensor
    query_up: Tensor
    value_up: Tensor
    output: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """``x [B, T, E]`` -> queries that meet the latent: ``[B, H, T, R]``."""
        return absorb_query(torch.einsum("hde,bte->bhtd", self.query, x), self.query_up)

    def outputs(self, z: Tensor) -> Tensor:
        """Weighted latents ``[B, H, T, R]`` -> ``[B, T, E]``."""
        return torch.einsum("bhtd,ehd->bte", expand_value(z, self.value_up), self.output)

    def products(self) -> tuple[Tensor, Tensor]:
        """``W_uk^T W_q [H, R, E]`` and ``W_o W_uv [E, H, R]``, multiplied out in at least float32."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        query = torch.einsum("hdr,hde->hre", self.query_up.to(wide), self.query.to(wide))
        output = torch.einsum("ehd,hdr->ehr", self.output.to(wide), self.value_up.to(wide))
        return query.to(self.query.dtype), output.to(self.output.dtype)


def absorbed_projections(W_q: Tensor, W_uk: Tensor, W_uv: Tensor, W_o: Tensor) -> AbsorbedProjections:
    """``W_q [H, Dn, E]``, ``W_uk [H, Dn, R]``, ``W_uv [H, Dv, R]``, ``W_o [E, H, Dv]`` as two chains.

    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    expect_shape("W_q", W_q, "H Dn E", {})
    heads, nope, model = W_q.shape
    expect_shape("W_uk", W_uk, "H Dn R", {"H": heads, "Dn": nope})
    expect_shape("W_uv", W_uv, "H Dv R", {"H": heads, "R": W_uk.shape[2]})
    expect_shape("W_o", W_o, "E H Dv", {"E": model, "H": heads, "Dv": W_uv.shape[1]})
    for name, weight in (("W_uk", W_uk), ("W_uv", W_uv), ("W_o", W_o)):
        expect_alike(name, weight, "W_q", W_q)
    return AbsorbedProjections(W_q, W_uk, W_uv, W_o)


def absorption_pays(queries: int, nope_dim: int, value_dim: int, rank: int) -> bool:
    """Whether absorbed attention takes fewer multiplications than explicit attention for ``T = queries``.

    Per slot and head: ``T (2 R + P)`` absorbed, ``(Dn + Dv) R + T (Dn + P + Dv)`` explicit.
    """
    explicit = nope_dim + value_dim
    return queries * (2 * rank - explicit) < explicit * rank


def absorb_query(query: Tensor, up_key: Tensor) -> Tensor:
    """``W_uk,h^T q``: ``query [B, H, T, Dn]``, ``up_key [H, Dn, R]`` -> ``[B, H, T, R]``."""
    return torch.einsum("bhtd,hdr->bhtr", query, up_key)


def expand_value(z: Tensor, up_value: Tensor) -> Tensor:
    """``W_uv,h z_h``: ``z [B, H, T, R]``, ``up_value [H, Dv, R]`` -> ``[B, H, T, Dv]``."""
    return torch.einsum("bhtr,hdr->bhtd", z, up_value)
