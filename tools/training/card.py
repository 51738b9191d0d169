"""The model card: written from the recipe, the training history and measured figures, never by hand."""

from typing import Any

from tools.training.plot import Curve, svg


def curve(name: str, history: list[dict[str, float]], key: str) -> Curve:
    return Curve(name=name, points=[(line["step"], line[key]) for line in history if key in line])


def loss_plot(target: list[dict[str, float]], drafter: list[dict[str, float]], tune: list[dict[str, float]]) -> str:
    """SVG: the target's loss in nats per token, and the drafter's tokens per step on its training batches."""
    before = drafter[-1]["step"]
    phases = [
        curve("corpus and rollouts", drafter, "chain"),
        curve("then rollouts", [line | {"step": line["step"] + before} for line in tune], "chain"),
    ]

    return svg(
        [
            ("Target: loss, nats per token", "step",
             [curve("training text", target, "text"), curve("held-out text", target, "held_out")]),
            ("Drafter: tokens per verify step, teacher forced", "step", phases),
        ]
    )  # fmt: skip


def _acceptance(figures: dict[str, Any]) -> str:
    shares = figures["accepted_per_position"]
    head = "| draft position | " + " | ".join(str(i + 1) for i in range(len(shares))) + " |"
    rule = "|---" * (len(shares) + 1) + "|"
    return "\n".join([head, rule, "| accepted | " + " | ".join(f"{share:.3f}" for share in shares) + " |"])


def card(recipe: dict[str, Any], files: dict[str, Any], corpus: dict[str, int], figures: dict[str, Any]) -> str:
    """README.md of the checkpoint."""
    loss = figures["loss"]
    change = {form: f"{100 * (loss[form] / loss['trained'] - 1):+.2f} %" for form in ("float32", "w8a8")}
    samples = "\n\n".join(
        f"```python\n{sample['prompt']}⟦{sample['completion']}⟧\n```" for sample in figures["samples"]
    )
    held = ", ".join(f"`{name}`" for name in files["held_out"])
    return f"""# dsv4 demo: a small DeepSeek-V4-Flash with its DSpark drafter

A toy that speaks: {figures["target_parameters"]:,} parameters of target, {figures["drafter_parameters"]:,} of draft stages, trained from
random initialisation on a CPU. It has every part of the big one (SWA, CSA and HCA layers, hyper-connections, hash and
learned routing over experts, an indexer, three draft stages with Markov and confidence heads) and is stored in the
released format (FP8 tiles, MXFP4 experts). It knows nothing but the look of Python source. **It contains no DeepSeek weights.**

## Figures

Measured by `python -m tools.eval_demo` on held-out files, greedy, W8A8, through the serving engine.

| | |
|---|---|
| loss, float32 as trained | {loss["trained"]:.4f} nats per token |
| loss, this checkpoint decoded to float32 | {loss["float32"]:.4f} ({change["float32"]}) |
| loss, W8A8 | {loss["w8a8"]:.4f} ({change["w8a8"]}) |
| bits per byte, W8A8 | {loss["bits_per_byte"]:.3f} |
| held-out tokens scored | {loss["tokens"]:,} |
| mean accepted length at K=7 | **{figures["mean_accepted_length"]:.2f}** of 8 |
| the same, first {figures["short_tokens"]} tokens of each answer | {figures["short_mean_accepted_length"]:.2f} |
| tokens generated, identical at K=0 and K=7 | {figures["identical_tokens"]:,} of {figures["generated_tokens"]:,} |
| prompts | {figures["prompts"]}, {figures["prompt_tokens"][0]} to {figures["prompt_tokens"][1]} tokens, at most {figures["max_tokens"]} new ones |

Share of verify steps that accepted at least so many drafts:

{_acceptance(figures)}

Greedy text of so small a model repeats itself, and repetition is easy to draft: {figures["repeated_share"]:.0%} of the generated tokens
end a run of 16 that the same answer had before ({figures["short_repeated_share"]:.0%} within the first {figures["short_tokens"]}). Read the accepted length as a proof that
the mechanism works, not as what the big drafter reaches.

![training curves](training.svg)

## Samples

Every {figures["prompts"] // len(figures["samples"])}th of the held-out prompts above (its last lines), and what follows between ⟦ and ⟧.

{samples}

## Data and licence

Source files of the standard library of CPython {files["python"]} (Copyright Python Software Foundation, PSF License Version 2), without
test suites, code page tables and generated text: {len(files["train"])} files, {corpus["train_bytes"]:,} bytes to train on, {len(files["held_out"])} files,
{corpus["held_out_bytes"]:,} bytes held out, split by file name. The weights add no terms of their own.

## Training

`python -m tools.train_demo WORK --out OUT`, seed {recipe["seed"]}.
Target: {recipe["target_steps"]} steps of {recipe["target_rows"] * recipe["target_length"]:,} tokens, AdamW, peak rate {recipe["target_lr"]}; the last
{100 - 100 * recipe["plain_fraction"]:.0f} % on {recipe["long_length"]} tokens with FP8, MXFP4 and int8 rounding simulated and the indexer selecting.
Drafter, by blocks of seven rows at {recipe["anchors"]} places of {recipe["drafter_rows"]} sequences a step: {recipe["drafter_stop"]} steps ({recipe["drafter_lr"]}), {100 * recipe["corpus_fraction"]:.0f} % of them on corpus
text and the rest on {recipe["rollouts"]:,} greedy continuations of training text by the W8A8 target; then {recipe["tune_steps"]} steps
({recipe["tune_lr"]}) on {recipe["tune_rollouts"]:,} other continuations alone, against the target's distribution at temperature {recipe["temperature"]}, because
decoding is greedy. Losses 0.1 CE, 0.9 L1 and 1.0 confidence, gamma {recipe["gamma"]:g}.

Held-out files: {held}.
"""
