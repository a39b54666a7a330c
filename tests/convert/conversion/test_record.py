"""The closing lines of a conversion: what it cost, and what was chosen."""

from unittest.mock import Mock

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.conversion.record import chosen_text, cost_text, groups_text
from kvfold.convert.data import demo_folder

RECORD = {
    "calibration": {"source": "text.txt"},
    "drift": {
        "sequences": 8,
        "length": 256,
        "perplexity": {"source": 40.0, "student": 44.2068},
        "excess": {"value": 0.1, "margin": 0.02},
        "kl": {"value": 0.12345},
        "agreement": {"value": 0.765},
    },
}


def test_the_cost_is_told_with_its_interval():
    assert cost_text(RECORD) == (
        "on 8 x 256 held-out tokens of text.txt: perplexity 40.00 -> 44.21 (+10.5 %, 95 % interval +8.3 to +12.7), "
        "KL 0.1235 nats, top-1 agreement 76.5 %"
    )
    assert cost_text({}) == ""


def test_a_cost_that_is_not_finite_is_told():
    broken = RECORD["drift"] | {"excess": {"value": None, "margin": None}}
    assert "not finite" in cost_text(RECORD | {"drift": broken})


def test_the_split_of_a_budget_is_told():
    plan = Mock(**{"request.budget": 32, "latent.kv_rank": 24, "latent.rope_dim": 8})
    splits = {"splits": [{}, {}, {}]}
    assert chosen_text(plan, splits) == "--budget 32: took 24+8 of 3 splits tried, which drifts least"
    other = {"engines": ["vLLM"], "kl": 0.5, "instead_of": {"kv_rank": 16, "rope_dim": 16, "kl": 0.48}}
    found = chosen_text(plan, {**splits, "preferred_for_engines": other})
    assert "because vLLM would not serve the best: a KL of 0.5000" in found
    assert found.endswith("the best, 16+16, has 0.4800")
    assert chosen_text(Mock(**{"request.budget": None}), splits) == ""


def test_the_groups_of_heads_are_told_and_why():
    def told(groups, **request):
        given = {"group": None, "resolved_method": "principal", "chosen_method.reads_text": True, **request}
        plan = Mock(**{f"request.{name}": value for name, value in given.items()})
        plan.geometry.heads, plan.geometry.kv_heads = 8, 4
        return groups_text(plan, {"groups": groups})

    neighbors = [[0, 1], [2, 3]]
    assert told([neighbors, [[0, 2], [1, 3]]]).startswith(
        "heads that share: others than neighbors in 1 of 2 layers, such as 0 2 | 1 3 in layer 1; each layer took"
    )
    assert told([neighbors]).endswith("trained to (--group similar compares others)")
    assert told([neighbors], group="similar").endswith("where no other grouping tried errs less on held-out text")
    assert told([neighbors], group="contiguous").endswith("in every layer, as --group contiguous asks")
    pooled = {"resolved_method": "mean", "chosen_method.reads_text": False}
    assert told([neighbors], **pooled).endswith("as --method mean joins them")
    assert told([[[0, 1, 2, 3]]]) == groups_text(Mock(), {}) == ""


def test_a_dry_run_of_a_budget_names_no_split(tmp_path):
    request = ConvertRequest(demo_folder(), tmp_path / "out", to="mla", budget=64, dry_run=True)
    done = convert_checkpoint(request)
    lines = done.summary().splitlines()
    assert "MHA -> MLA, split by measured drift, method principal: 512 -> 64 KV-cache elements" in lines[0]
    assert "  model.layers.0.self_attn.kv_b_proj.weight  BF16 new" in lines  # its shape would be that of a split
    assert done.to_dict()["attention"] == {"from": "MHA", "to": "MLA, split by measured drift"}


def test_a_conversion_ends_with_its_cost_and_the_next_command(tiny_reader, tmp_path):
    options = {"to": "mqa", "samples": 2, "seq_len": 16, "quiet": True}
    lines = convert_checkpoint(ConvertRequest(tiny_reader, tmp_path / "out", **options)).summary()
    assert "\non 8 x 16 held-out tokens of the built-in standard-library text: perplexity " in lines
    assert lines.endswith(
        f"next: kvfold drift {tiny_reader} {tmp_path / 'out'} --text FILE measures it on text of yours"
    )
