"""A small byte-level BPE tokenizer with DeepSeek's control tokens, for checkpoints that have no tokenizer of their own.

Ids are laid out as in the release: begin and end of sentence and padding first, then bytes and merges, then a noise
placeholder and the chat tokens as the last ids. The vocabulary has exactly as many ids as the model has rows.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4.errors import ConfigError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
NOISE = "<｜place▁holder▁no▁799｜>"
CHAT = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")
MIN_VOCAB = 3 + 256 + 1 + len(CHAT)

TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_eos_token": False,
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": EOS,
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
}

_CHAT_LINES = "\n".join(f'    "{token}",' for token in CHAT)
ENCODING_CONSTANTS = f'''"""Control tokens of the DeepSeek-V4 chat encoding, as this checkpoint's tokenizer spells them."""

BOS = "{BOS}"
EOS = "{EOS}"
USER, ASSISTANT, THINK_START, THINK_END, DSML, LATEST_REMINDER = (
{_CHAT_LINES}
)
'''


def noise_token_id(vocab_size: int) -> int:
    """Where `train_tokenizer` puts the placeholder that the drafter's query rows start from."""
    return vocab_size - 1 - len(CHAT)


def _training_text() -> list[str]:
    from pydoc_data.topics import topics  # the language reference that comes with Python: 700 kB of plain English

    return [topics[name] for name in sorted(topics)]


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Trains on the Python language reference; the same Python version gives the same vocabulary.

    Raises: ConfigError if `vocab_size` has no room for 256 bytes and the control tokens.
    """
    if vocab_size < MIN_VOCAB:
        raise ConfigError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {MIN_VOCAB}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=noise_token_id(vocab_size),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    unused = noise_token_id(vocab_size) - tokenizer.get_vocab_size()  # the text may run out of merges
    tokenizer.add_special_tokens([f"<｜place▁holder▁no▁{1000 + i}｜>" for i in range(unused)] + [NOISE])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CHAT])
    return tokenizer
