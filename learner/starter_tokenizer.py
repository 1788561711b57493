"""The starter policy's tokenizer: every character of plain text is one token.

Byte-level with no merges, so that no text is unknown, rewritten or dropped: decoding what was
encoded gives the same text, and a tool reply never changes the tokens around it. (A character
outside ASCII takes as many tokens as it has bytes.)
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """A fresh tokenizer: pad 0, bos 1, eos 2, then the 256 bytes.

    max_tokens: longest context of the policy; longer text only warns.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(folder: Path, max_tokens: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer and write the files that `AutoTokenizer.from_pretrained` reads."""
    tokenizer = build_tokenizer(max_tokens)
    tokenizer.save_pretrained(folder)
    return tokenizer
