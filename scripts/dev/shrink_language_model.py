"""Write a folder of a language model without its word embeddings and in half precision, for a machine without a network.

    python scripts/dev/shrink_language_model.py FOLDER build/minilm --layers 6

`components/backbone=pretrained` reads neither word embeddings nor head. all-MiniLM-L6-v2 becomes 22 MB instead of 91.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

LEFT_OUT = ("word_embeddings", "wte.", "embed_tokens", "pooler", "lm_head", "position_ids")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("target", type=Path)
    parser.add_argument("--layers", type=int, help="only the first so many blocks")
    options = parser.parse_args()
    config = json.loads((options.source / "config.json").read_text())
    layers = min(options.layers or config["num_hidden_layers"], config["num_hidden_layers"])
    tensors = {}
    for file in sorted(options.source.glob("*.safetensors")):
        for name, value in load_file(file).items():
            block = re.search(r"\b(?:layer|layers|h)\.(\d+)\.", name)
            if not any(part in name for part in LEFT_OUT) and (block is None or int(block[1]) < layers):
                tensors[name] = value.half() if value.is_floating_point() else value
    options.target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.target / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = layers
    (options.target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{options.target}: {sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
