"""The demo's tokenizer: byte-level BPE trained on the corpus, with ids laid out as `dsv4.checkpoint.vocabulary` does."""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4.checkpoint.vocabulary import BOS, CHAT, EOS, NOISE, PAD, noise_token_id


def train(vocab_size: int, texts: Sequence[str]) -> Tokenizer:
    """Exactly `vocab_size` ids: control tokens, bytes and merges, the drafter's noise token, chat tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=noise_token_id(vocab_size), special_tokens=[BOS, EOS, PAD], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([NOISE])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CHAT])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} ids, expected {vocab_size}: the corpus is too small")
    return tokenizer
