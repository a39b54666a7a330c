"""Three training steps on a checkpoint, in a Python with peft: train_steps.py CHECKPOINT OUT.json

Puts LoRA on every linear layer, trains, merges it into the weights, saves and loads the result.
OUT.json gets the losses, and how far the loaded model's logits are from the trained one's.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

STEPS = 3
TEXT = "The function count returns the number of items in a list."


def train(checkpoint):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)(TEXT)["input_ids"]])
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=5e-3
    )
    losses = []
    for _ in range(STEPS + 1):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = model.eval().merge_and_unload()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        merged.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return {
            "losses": losses,
            "apart": (merged(ids).logits - again(ids).logits).abs().max().item(),
        }


if __name__ == "__main__":
    torch.manual_seed(0)
    Path(sys.argv[2]).write_text(json.dumps(train(sys.argv[1])))
