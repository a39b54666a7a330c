"""Three training steps on a checkpoint, in a Python with peft and trl: train_steps.py peft|trl
CHECKPOINT OUT.json

``peft`` puts LoRA on every linear layer, trains, merges it into the weights, saves and loads the
result; ``trl`` runs its SFTTrainer on the folder. OUT.json gets the losses, and for ``peft`` how
far the loaded model's logits are from the trained one's.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

STEPS = 3
SAID = [
    f"The function {name} returns the number of {name} items in a list."
    for name in ("count", "size", "length")
]


def with_peft(checkpoint: str) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)(SAID[0])["input_ids"]])
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


def with_trl(checkpoint: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=3, learning_rate=1e-3, logging_steps=1,
            lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, bf16=False, max_length=64,
        )  # fmt: skip
        texts = Dataset.from_list([{"text": text} for text in SAID])
        trainer = SFTTrainer(model=checkpoint, args=options, train_dataset=texts)
        trainer.train()
        return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


if __name__ == "__main__":
    torch.manual_seed(0)
    run = {"peft": with_peft, "trl": with_trl}[sys.argv[1]]
    Path(sys.argv[3]).write_text(json.dumps(run(sys.argv[2])))
