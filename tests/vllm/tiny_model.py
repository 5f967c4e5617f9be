"""The checkpoint folder of a tiny Llama, the same bytes every time: a model for a real engine.

Owns the making of it; run it with the Python of the vLLM environment (it needs PyTorch,
transformers and tokenizers, and downloads nothing):

    .venv-vllm/bin/python tests/vllm/tiny_model.py build/tiny-llama

The weights are random but fixed, so a greedy answer is a fixed canary. About 5 MB.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

SEED = 20260101
VOCABULARY = 512
SENTENCE = "Prefill workers read the prompt, decode workers write the answer, one token at a time. "
# All that a byte-level vocabulary may lack of a text: it never has an unknown token.
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
EOS, BOS = "</s>", "<s>"


def make(folder: Path, *, seed: int = SEED, layers: int = 4, hidden: int = 256) -> str:
    """Write the folder and return the SHA-256 of its weights. Raises ImportError, OSError.

    Args:
        folder: made if it is not there; files in it are overwritten. seed: other weights, and so
            other answers, of the same shape. layers, hidden: its size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(str(folder))
    model = _model(tokenizer, seed=seed, layers=layers, hidden=hidden)
    model.save_pretrained(str(folder), safe_serialization=True)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain.train_from_iterator([SENTENCE], trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=BOS, eos_token=EOS)
    found.chat_template = TEMPLATE  # a file of its own in the folder
    return found


def _model(tokenizer: Any, *, seed: int, layers: int, hidden: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden // 32
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the order of additions is part of "the same every time"
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that the best token wins clearly: an answer that every kernel gives.
                parameter.normal_(0.0, 0.08)
    return model.to(torch.bfloat16).eval()


def main() -> None:
    """`tiny_model.py FOLDER [SEED]`."""
    if len(sys.argv) not in {2, 3}:
        sys.exit("usage: tiny_model.py FOLDER [SEED]")
    folder = Path(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) == 3 else SEED
    print(json.dumps({"folder": str(folder), "weights_sha256": make(folder, seed=seed)}))


if __name__ == "__main__":
    main()
