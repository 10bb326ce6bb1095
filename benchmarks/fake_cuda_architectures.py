"""Thirty architectures of Hugging Face, each from a small configuration, with a batch and a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Built = tuple[nn.Module, dict[str, Tensor], Callable[[Any, Tensor], Tensor]]

_TOKENS, _WORDS = 8, 40

_TEXT = {
    "vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_CAUSAL = _TEXT | {"use_cache": False, "num_key_value_heads": 1}
_IMAGE = {
    "image_size": 32, "patch_size": 8, "num_channels": 3, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 48, "num_labels": 5,
}  # fmt: skip
_SEQUENCES = {
    "vocab_size": _WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "conv_dim": (16, 16),
    "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0, "num_labels": 5,
    "classifier_proj_size": 16,
}  # fmt: skip


def _all_outputs(outputs: Any, targets: Tensor) -> Tensor:
    """Return one number of the outputs of floating point."""
    tensors = [leaf for leaf in tree_leaves(dict(outputs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((tensor.float().square().mean() for tensor in tensors), targets.float().sum())


def _words(generator: torch.Generator, *, decoder: bool = False) -> dict[str, Tensor]:
    words = torch.randint(3, _WORDS, (2, _TOKENS), generator=generator)
    mask = torch.ones(2, _TOKENS, dtype=torch.int64)
    mask[1, -2:] = 0
    return {"input_ids": words, "attention_mask": mask} | ({"decoder_input_ids": words} if decoder else {})


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def _sounds(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 512, generator=generator)}


def _mels(generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(3, _WORDS, (2, _TOKENS), generator=generator)
    return {"input_features": torch.randn(2, 16, 64, generator=generator), "decoder_input_ids": words}


def _both(generator: torch.Generator) -> dict[str, Tensor]:
    return _words(generator) | _images(generator)


def _build(
    name: str, head: str, options: dict[str, Any], inputs: Callable[..., dict[str, Tensor]], **given: Any
) -> Built:
    import transformers

    torch.default_generator.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}{head}")(config)
    return model, inputs(torch.Generator().manual_seed(4), **given), _all_outputs


def _entry(
    name: str, head: str, options: dict[str, Any], inputs: Callable[..., dict[str, Tensor]], **given: Any
) -> tuple[str, Callable[[], Built]]:
    return name, functools.partial(_build, name, head, options, inputs, **given)


_GPT = {"vocab_size": _WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}
_CLIP_PART = {key: value for key, value in _TEXT.items() if key != "max_position_embeddings"}
_VISION_PART = {key: value for key, value in _IMAGE.items() if key != "num_labels"}

ARCHITECTURES: dict[str, Callable[[], Built]] = dict(
    (
        _entry("GPT2", "LMHeadModel", _GPT | {"bos_token_id": 0, "eos_token_id": 0}, _words),
        _entry("GPTNeo", "ForCausalLM", {
            "vocab_size": _WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]], "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
        }, _words),
        _entry("GPTNeoX", "ForCausalLM", _TEXT | {"use_cache": False}, _words),
        _entry("OPT", "ForCausalLM", {
            "vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 48,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32, "use_cache": False,
        }, _words),
        _entry("Bloom", "ForCausalLM", {
            "vocab_size": _WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 2, "use_cache": False,
        }, _words),
        _entry("Llama", "ForCausalLM", _CAUSAL, _words),
        _entry("Mistral", "ForCausalLM", _CAUSAL, _words),
        _entry("Qwen2", "ForCausalLM", _CAUSAL, _words),
        _entry("Qwen3", "ForCausalLM", _CAUSAL | {"head_dim": 16}, _words),
        _entry("Gemma", "ForCausalLM", _CAUSAL | {"head_dim": 16}, _words),
        _entry("Gemma2", "ForCausalLM", _CAUSAL | {"head_dim": 16}, _words),
        _entry("Phi", "ForCausalLM", _CAUSAL | {"num_key_value_heads": 2}, _words),
        _entry("Phi3", "ForCausalLM", _CAUSAL, _words),
        _entry("StableLm", "ForCausalLM", _CAUSAL, _words),
        _entry("Cohere", "ForCausalLM", _CAUSAL, _words),
        _entry("Olmo", "ForCausalLM", _CAUSAL, _words),
        _entry("Falcon", "ForCausalLM", {
            "vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "use_cache": False,
        }, _words),
        _entry("Bert", "ForMaskedLM", _TEXT, _words),
        _entry("Roberta", "ForMaskedLM", _TEXT, _words),
        _entry("DistilBert", "ForMaskedLM", {
            "vocab_size": _WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48,
            "max_position_embeddings": 64,
        }, _words),
        _entry("Albert", "ForMaskedLM", _TEXT | {"embedding_size": 16}, _words),
        _entry("Electra", "ForMaskedLM", _TEXT | {"embedding_size": 16}, _words),
        _entry("DebertaV2", "ForMaskedLM", _TEXT | {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        }, _words),
        _entry("T5", "ForConditionalGeneration", {
            "vocab_size": _WORDS, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
            "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0,
        }, _words, decoder=True),
        _entry("Bart", "ForConditionalGeneration", _SEQUENCES | {"forced_eos_token_id": None}, _words, decoder=True),
        _entry("Whisper", "ForConditionalGeneration", _SEQUENCES | {
            "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64,
        }, _mels),
        _entry("ViT", "ForImageClassification", _IMAGE, _images),
        _entry("DeiT", "ForImageClassification", _IMAGE, _images),
        _entry("Dinov2", "ForImageClassification", _IMAGE, _images),
        _entry("ConvNext", "ForImageClassification", {
            "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_labels": 5,
        }, _images),
        _entry("ResNet", "ForImageClassification", {
            "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_labels": 5,
        }, _images),
        _entry("Swin", "ForImageClassification", {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
            "window_size": 4, "num_labels": 5,
        }, _images),
        _entry("CLIP", "Model", {
            "text_config": _CLIP_PART | {"max_position_embeddings": 64}, "vision_config": _VISION_PART,
            "projection_dim": 16,
        }, _both),
        _entry("Wav2Vec2", "ForSequenceClassification", _SPEECH, _sounds),
    )
)  # fmt: skip
"""The architectures, by the beginning of their class's name."""
