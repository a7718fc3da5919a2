"""Makes parity.json with Hugging Face transformers, not needed otherwise: logits of the models in parity.py.

python make_parity.py      (torch 2.13, transformers 5.24, in float32)
"""

import json
import tempfile
from pathlib import Path

import torch
from parity import CASES, config, positions, tensors, tokens
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent


@torch.no_grad()
def logits(name: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(name)))
        save_file(tensors(name), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = model(torch.tensor([tokens(name)])).logits[0].float()
    return {str(at): [round(float(v), 5) for v in rows[at]] for at in positions(name)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    golden = {name: logits(name) for name in CASES}
    (HERE / "parity.json").write_text(json.dumps(golden) + "\n")
