"""A language model of a few kilobytes with a byte-level tokenizer, made on the spot: nothing is downloaded.

Its weights are random but always the same, and wide enough that greedy decoding doesn't repeat one token. Needs torch
and transformers.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

VOCABULARY = 260
END_OF_TEXT = 256
AUDIO, BEFORE_AUDIO, AFTER_AUDIO = 260, 261, 262

QUICK: dict[str, Any] = {
    "fork": True,
    "environment": {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core computes itself, without a process of its own for that
    },
    "sampling": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
    "engine": {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 * 1024 * 1024,
    },
}
"""Options that start a tiny model in seconds on a CPU; only `model` is missing."""


def make_tiny_model(folder: str | Path, *, context: int = 1024, hidden: int = 64, layers: int = 2) -> Path:
    """Write the model and its tokenizer into `folder`. `context`: how many tokens it can hold."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    folder = Path(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **_sizes(context, hidden, layers))
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def make_tiny_listener(folder: str | Path, *, context: int = 1024) -> Path:
    """A model as tiny that also takes audio (16 kHz), of the kind of Qwen2-Audio. `AUDIO` is the placeholder's token.

    `BEFORE_AUDIO` and `AFTER_AUDIO` stand around it.
    """
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    safetensors: Any = import_module("safetensors.torch")
    folder = Path(folder)
    torch.manual_seed(7)
    tokenizer = _byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    features = transformers.WhisperFeatureExtractor(feature_size=16, sampling_rate=16_000)
    ear: dict[str, Any] = {
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 64,
    }
    config = transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **ear},
        text_config={"model_type": "qwen2", "vocab_size": 272, **_sizes(context, 64, 2)},
        audio_token_index=AUDIO,
    )
    transformers.Qwen2AudioForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    transformers.Qwen2AudioProcessor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(folder)
    # transformers 5 repeats a part of the name that the published checkpoints, and vLLM, have once.
    weights = folder / "model.safetensors"
    named = safetensors.load_file(weights)
    once = {name.replace("language_model.model.model.", "language_model.model."): each for name, each in named.items()}
    safetensors.save_file(once, weights, metadata={"format": "pt"})
    return folder


def _sizes(context: int, hidden: int, layers: int) -> dict[str, Any]:
    """What both kinds of language model have in common."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "max_position_embeddings": context,
        "initializer_range": 0.3,  # the default's greedy answers are one token over and over
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
    }


def _byte_tokenizer() -> Any:
    """A token for each byte, and four special ones."""
    tokenizers: Any = import_module("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    letters = sorted(byte_level.alphabet())
    special = ["<end>", "<unused1>", "<unused2>", "<unused3>"]
    vocabulary = {letter: number for number, letter in enumerate([*letters, *special])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers: Any = import_module("transformers")
    ends = dict.fromkeys(("eos_token", "bos_token"), "<end>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Make a tiny model of random weights in FOLDER.")
    arguments.add_argument("folder", metavar="FOLDER")
    arguments.add_argument("--context", type=int, default=1024, help="how many tokens it can hold")
    arguments.add_argument("--hidden", type=int, default=64, help="its width, a multiple of 32")
    arguments.add_argument("--layers", type=int, default=2)
    given = arguments.parse_args()
    made = make_tiny_model(given.folder, context=given.context, hidden=given.hidden, layers=given.layers)
    sys.stdout.write(f"{made}\n")
