"""/v1/completions over a socket, with tokens computed by hand."""

import json

import openai
import pytest

from serving.http.settings import GenerationDefaults
from tests.support.toy_engine import ToyEngine


def events(response):
    """The data of each server-sent event, `[DONE]` checked and removed."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def post(client, **body):
    return client.post("/v1/completions", json=body)


def ids_of(tokenizer, *words):
    return [i for word in words for i in tokenizer.encode(word)]


def test_plain_completion(toy_server):
    client = toy_server(ToyEngine(cached_tokens=2))
    body = post(client, prompt=[10, 20, 30], max_tokens=3, return_token_ids=True).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "toy"
    assert body["choices"][0]["token_ids"] == [31, 32, 33]
    assert body["choices"][0]["prompt_token_ids"] == [10, 20, 30]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 21},
    }


@pytest.mark.parametrize("steps", [(1,), (8,), (3, 1, 5)])
@pytest.mark.parametrize("stop", [None, "wor", ["\n", "! "]])
def test_stream_equals_non_stream_at_every_step_size(toy_server, v4_tokenizer, steps, stop):
    script = v4_tokenizer.encode("Hello 👩‍👩‍👧 world! 한국어 é\u0301 done\nmore")
    client = toy_server(ToyEngine(script=script, steps=steps))
    request = {"prompt": "x", "max_tokens": 64, "stop": stop, "return_token_ids": True, "logprobs": 2}
    whole = post(client, **request).json()
    parts = events(post(client, **request, stream=True, stream_options={"include_usage": True}))
    usage = parts.pop()
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    choices = [part["choices"][0] for part in parts]
    choice = whole["choices"][0]
    assert "".join(part["text"] for part in choices) == choice["text"]
    assert [i for part in choices for i in part["token_ids"]] == choice["token_ids"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in choices for x in part["logprobs"][key]] == choice["logprobs"][key]
        assert len(choice["logprobs"][key]) == whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert [part["finish_reason"] for part in choices][-1] == choice["finish_reason"] == "stop"
    one_by_one = toy_server(ToyEngine(script=script, steps=(1,)))
    assert choice["text"] == post(one_by_one, **request).json()["choices"][0]["text"]


def test_stop_string_aborts_the_engine_and_trims_everything(toy_server, v4_tokenizer):
    engine = ToyEngine(script=ids_of(v4_tokenizer, "a", "b", "c", "d", "e", "f", "g", "h", "i"), steps=(8,))
    client = toy_server(engine)
    body = post(client, prompt="x", stop="c", logprobs=0, return_token_ids=True).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["token_ids"] == engine.script[:2]
    assert choice["draft_mask"] == [True, True]
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert body["usage"]["completion_tokens"] == 2
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 2
    assert engine.aborted and not engine.live


def test_eos_stops_unless_ignored(toy_server, v4_tokenizer):
    client = toy_server(ToyEngine(script=[*ids_of(v4_tokenizer, "a"), 1]))
    stopped = post(client, prompt="x", max_tokens=5).json()
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("a", "stop")
    assert stopped["usage"]["completion_tokens"] == 2
    ignored = post(client, prompt="x", max_tokens=5, ignore_eos=True).json()
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", [[0]]),
        ([5], [[5]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", ""], [None, [0]]),
    ],
)
def test_prompt_forms(toy_server, v4_tokenizer, prompt, expected):
    engine = ToyEngine()
    client = toy_server(engine)
    body = post(client, prompt=prompt, max_tokens=2, ignore_eos=True).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    seen = [ids for _, ids, _ in engine.submitted]
    assert seen == [ids or v4_tokenizer.encode("a") for ids in expected]
    assert body["usage"]["completion_tokens"] == 2 * len(expected)


def test_many_prompts_stream_side_by_side(toy_server):
    client = toy_server(ToyEngine(steps=(1, 2)))
    parts = events(post(client, prompt=[[10], [20], [30]], max_tokens=5, stream=True, return_token_ids=True))
    ids = {0: [], 1: [], 2: []}
    for part in parts:
        ids[part["choices"][0]["index"]] += part["choices"][0]["token_ids"]
    assert ids == {0: [11, 12, 13, 14, 15], 1: [21, 22, 23, 24, 25], 2: [31, 32, 33, 34, 35]}


def test_all_prompts_or_none_are_taken(toy_server):
    engine = ToyEngine(max_live=2)
    client = toy_server(engine)
    response = post(client, prompt=[[1], [2], [3]], max_tokens=2)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"]["code"] == "overloaded"
    assert not engine.live and len(engine.aborted) == 2


def test_max_tokens_is_cut_to_what_fits(toy_server):
    client = toy_server(ToyEngine(max_model_len=8))
    body = post(client, prompt=[1, 2, 3], max_tokens=100).json()
    assert body["usage"]["completion_tokens"] == 5
    too_long = post(client, prompt=list(range(2, 10)))
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert too_long.json()["error"]["param"] == "prompt"


def test_server_defaults_and_what_overrides_them(toy_server):
    engine = ToyEngine()
    client = toy_server(engine, defaults=GenerationDefaults.from_json('{"max_new_tokens": 3, "stop": ["zz"]}'))
    assert post(client, prompt=[7], max_tokens=None).json()["usage"]["completion_tokens"] == 3
    post(client, prompt=[7], stop=[])
    assert [params.stop for _, _, params in engine.submitted] == [("zz",), ()]


def test_engine_failure_ends_requests_with_an_error(toy_server):
    client = toy_server(ToyEngine(fail_after=2))
    failed = post(client, prompt=[7])
    assert failed.status_code == 500
    assert failed.json()["error"] == {
        "message": "the worker of rank 0 died",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    parts = events(post(client, prompt=[7], stream=True))
    assert parts[-1]["error"]["message"] == "the worker of rank 0 died"


def test_openai_client(toy_server, v4_tokenizer):
    client = toy_server(ToyEngine(script=v4_tokenizer.encode("one two three")))
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as api:
        assert [model.id for model in api.models.list()] == ["toy"]
        assert api.models.retrieve("toy").id == "toy"
        whole = api.completions.create(model="toy", prompt="x")
        assert whole.choices[0].text == "one two three"
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 0
        streamed = api.completions.create(model="toy", prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == "one two three"
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
            api.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            api.completions.create(model="toy", prompt="x", temperature=0.7)


def test_logprobs_are_refused_where_there_are_none(toy_server):
    for most, words in [(None, "returns none"), (3, "at most 3")]:
        client = toy_server(ToyEngine(max_logprobs=most))
        error = post(client, prompt=[7], logprobs=4).json()["error"]
        assert error["param"] == "logprobs" and words in error["message"]
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 4}
        assert words in client.post("/v1/chat/completions", json=chat).json()["error"]["message"]


def test_a_mistake_of_our_own_is_logged_and_not_told(toy_server, caplog):
    class Broken(ToyEngine):
        def _logprobs(self, ids, params):
            raise KeyError("a secret")

    client = toy_server(Broken())
    plain, streamed = post(client, prompt=[7]), post(client, prompt=[7], stream=True)
    assert plain.status_code == 500
    for error in (plain.json()["error"], events(streamed)[-1]["error"]):
        assert error["type"] == "server_error" and "secret" not in error["message"]
    assert caplog.text.count("a secret") >= 2


def test_tokenize_nothing(toy_server):
    error = toy_server(ToyEngine()).post("/tokenize", json={}).json()["error"]
    assert error["message"].startswith("send either") and error["param"] is None
