"""Every flag that can be refused before a weight is read, in one line that says what was expected and what came."""

import json

import pytest

from dsv4.config import load_config
from dsv4.errors import ConfigError
from serving.args import EngineArgs, check_drafter, resolve
from tests.support.models import tiny_config

REAL = load_config("configs/model/deepseek-v4-flash-dspark.json")
EIGHT = {"dp": 2, "ep": 8, "tp": 4, "devices": "0,1,2,3,4,5,6,7"}
SIXTEEN = {"dp": 4, "ep": 16, "tp": 4, "devices": ",".join(map(str, range(16)))}


def spec(**fields) -> dict:
    return {"speculative_config": json.dumps({"method": "dspark"} | fields)}


def check(platform: str, **flags):
    return resolve(EngineArgs(model="m", **flags), REAL, platform)


@pytest.mark.parametrize("layout", [EIGHT, SIXTEEN])
def test_documented_command_lines(layout: dict) -> None:
    most = 64 * layout["dp"]
    flags = layout | spec(num_speculative_tokens=7) | {"max_model_len": 1_048_576, "max_num_seqs": most}
    settings = check("a2a3", **flags, max_num_batched_tokens=32768, long_prefill_token_threshold=8192, ring_heap="0")
    assert (settings.k, settings.partitions, len(settings.devices), settings.chunk) == (
        7,
        layout["dp"],
        layout["ep"],
        8192,
    )


def test_defaults_on_a_cpu() -> None:
    settings = check("cpu")
    assert (settings.k, settings.devices, settings.chunk) == (0, (0,), 2048)


def test_drafting_is_adaptive_on_a_cpu_unless_told() -> None:
    assert check("cpu", num_speculative_tokens=7).adaptive and check("cpu", **spec(num_speculative_tokens=7)).adaptive
    assert not check("cpu", **spec(num_speculative_tokens=7, adaptive=False)).adaptive
    assert not check("cpu").adaptive and not check("cpu", **spec(num_speculative_tokens=0, adaptive=True)).adaptive
    assert not check("a2a3", **EIGHT, **spec(num_speculative_tokens=7)).adaptive
    assert check("a2a3", **EIGHT, **spec(num_speculative_tokens=7, adaptive=True)).adaptive


BAD = {
    "not JSON": ({"speculative_config": "{"}, "expected a JSON object"),
    "not an object": ({"speculative_config": "[7]"}, "expected a JSON object"),
    "method": (spec() | {"speculative_config": '{"method":"eagle"}'}, "method is 'eagle'"),
    "unknown field": (spec(draft="x"), "unknown field 'draft'"),
    "K = 5": (spec(num_speculative_tokens=5), "is 5, expected the integer 7"),
    "adaptive": (spec(num_speculative_tokens=7, adaptive="yes"), "adaptive is 'yes', expected true or false"),
    "K = true": (spec(num_speculative_tokens=True), "is True"),
    "K = 7.0": (spec(num_speculative_tokens=7.0), "is 7.0"),
    "both": (spec() | {"num_speculative_tokens": 7}, "exclude each other"),
    "block size": ({"block_size": 128}, "--block-size is 128, expected 32"),
    "no requests": ({"max_num_seqs": 0}, "expected 1..64"),
    "many requests": ({"max_num_seqs": 65}, "--max-num-seqs is 65"),
    "context": ({"max_model_len": 1_048_577}, "expected 2..1048576"),
    "budget": (spec(num_speculative_tokens=7) | {"max_num_batched_tokens": 7}, "at least 8"),
    "threshold": ({"long_prefill_token_threshold": -1}, "expected 0 or more"),
    "devices blank": ({"devices": "0,,1"}, "without blanks"),
    "devices twice": ({"ep": 2, "tp": 2, "devices": "1,1"}, "names a device twice"),
    "devices count": ({"ep": 2, "tp": 2, "devices": "1"}, "expected 2 device ids"),
    "layout": ({"dp": 2}, "expected dp x tp = ep"),
    "layout does not divide": ({"tp": 3, "ep": 3, "devices": "0,1,2"}, "does not divide num_attention_heads"),
    "utilisation": ({"npu_memory_utilization": 1.5}, "expected a share"),
    "ring heap": ({"ring_heap": "1000"}, "power of two"),
    "ring count": ({"ring_dep_pool": "1,2"}, "one non-negative integer or four"),
    "dtype": ({"dtype": "float16"}, "--dtype is 'float16'"),
    "replay": ({"prefix_replay": 64}, "--prefix-replay is 64"),
    "no threads": ({"threads": 0}, "--threads is 0, expected 1..1024"),
    "many threads": ({"threads": 100_000}, "--threads is 100000"),
    "no queue": ({"max_waiting": 0}, "--max-waiting is 0"),
    "timeout": ({"step_timeout": float("nan")}, "--step-timeout is nan"),
    "cache dtype": ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "the cache follows the dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    flags, message = BAD[name]
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        check("cpu", **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (EIGHT | {"tp": 2}, "--tp is 2, expected 4"),
        (EIGHT | {"ep": 4}, "--ep is 4, expected 8 or 16"),
        (EIGHT | {"dp": 4}, "--dp is 4, expected 2"),
        (SIXTEEN | {"devices": "0,1"}, "expected 16 device ids"),
        (SIXTEEN | {"devices": None, "device": 3}, "expected 16 device ids, one per rank, got 1"),
        (SIXTEEN | {"max_num_seqs": 257}, "expected 1..256"),
    ],
)
def test_npu_layouts(flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("a2a3", **flags)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dspark_target_layer_ids": (0, 1, 2)}, "dspark_target_layer_ids"),
        ({"dspark_noise_token_id": 160}, "dspark_noise_token_id"),
        ({"dspark_noise_token_id": None}, "dspark_noise_token_id"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank"),
        ({"compress_ratios": (0, 0, 4, 128, 4), "dspark_target_layer_ids": ()}, "three draft stages"),
        ({"compress_ratios": (0, 0, 4, 128, 4, 0), "dspark_target_layer_ids": (4,)}, "three draft stages"),
    ],
)
def test_a_checkpoint_that_cannot_draft(changes: dict, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        check_drafter(tiny_config(**changes))


def test_a_block_size_of_five_drafts_seven() -> None:
    """faults.md 32: dspark_block_size is what the drafter was trained with, not what may be served."""
    cfg = tiny_config(dspark_block_size=5)
    assert resolve(EngineArgs(model="m", **spec(num_speculative_tokens=7)), cfg, "cpu").k == 7


def test_ring_flags_warn(caplog: pytest.LogCaptureFixture) -> None:
    check("cpu", ring_heap="4096,0,0,8192", ring_task_window="16")
    assert ["--ring-heap" in r.message or "--ring-task-window" in r.message for r in caplog.records] == [True, True]
