"""Control tokens of the DeepSeek-V4 chat encoding, as this checkpoint's tokenizer spells them."""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER, ASSISTANT, THINK_START, THINK_END, DSML, LATEST_REMINDER = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
)
