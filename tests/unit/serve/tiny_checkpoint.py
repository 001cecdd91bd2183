"""A tiny hybrid Qwen3.5 checkpoint, written with transformers: three GDN layers and one of attention.

Run as a program, ``python tiny_checkpoint.py FOLDER``, it writes one, in an environment that has torch. One printable
character is one token, so that text maps back to ids.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

HEADS = (
    ("route", ["kitchen", "garden", "street"]),
    ("mood", ["calm", "tense"]),
    ("length", ["short", "long"]),
)


def write(folder: Path, *, seed: int = 7) -> None:
    """config, weights, tokenizer and three heads into ``folder``."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    characters = [c for c in string.printable if c.isprintable()]
    vocabulary = {"<end>": 0} | {c: i for i, c in enumerate(characters, 1)}
    config = Qwen3_5TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?").save_pretrained(folder)
    tensors = {}
    for name, labels in HEADS[:2]:
        tensors[f"{name}.weight"] = torch.randn(len(labels), config.hidden_size)
        tensors[f"{name}.bias"] = torch.randn(len(labels))
    save_file(tensors, folder / "heads.safetensors")
    entries: list[dict[str, object]] = [
        {"name": n, "labels": ls, "weight": f"{n}.weight", "bias": f"{n}.bias"} for n, ls in HEADS[:2]
    ]
    name, labels = HEADS[2]
    entries.append({"name": name, "labels": labels, "tokens": [vocabulary["s"], vocabulary["l"]]})
    (folder / "heads.json").write_text(json.dumps({"heads": entries, "tensors": "heads.safetensors"}, indent=1))
    for file in folder.iterdir():  # a server in a container runs as another user
        file.chmod(0o644)
    folder.chmod(0o755)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
