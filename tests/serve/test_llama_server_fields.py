"""Fields, answers and paths of llama-server beside those of OpenAI's API."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from exchanges import PATH, QUESTION, chunks_of, error_of
from test_images_over_http import picture

TEXT = "Once upon a time, there was a fox who"
IGNORED = "x-rlx-ignored"


def completion(server: Any, **body: Any) -> Any:
    answer = server.post("/completion", **{"prompt": TEXT, "temperature": 0, "n_predict": 6, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_without_the_cache_a_prompt_is_computed_again_with_the_same_answer(server: Any) -> None:
    long = TEXT * 8
    first = completion(server, prompt=long)
    again, fresh = completion(server, prompt=long), completion(server, prompt=long, cache_prompt=False)
    assert again["timings"]["cache_n"] > 0 and fresh["timings"]["cache_n"] == 0
    assert first["content"] == again["content"] == fresh["content"]


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/completion"])
def test_hints_of_llama_server_are_accepted_and_named(server: Any, path: str) -> None:
    body = {"messages": QUESTION} if path == PATH else {"prompt": TEXT}
    hints = {"id_slot": 0, "n_keep": 4, "n_cache_reuse": 256, "backend_sampling": True}
    answer = server.post(path, **body, max_tokens=1, **hints)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[IGNORED].split(", ")) == set(hints)
    same = {"id_slot": -1, "n_cache_reuse": 0, "cache_prompt": True, "verbose": False, "backend_sampling": False}
    assert IGNORED not in server.post(path, **body, max_tokens=1, **same).headers


def test_what_an_answer_was_generated_with(server: Any) -> None:
    found = completion(server, seed=7, top_k=3, stop=["owl"], logit_bias=[[5, False], [6, 1.5]], ignore_eos=True)
    asked = found["generation_settings"]
    assert (asked["seed"], asked["temperature"], asked["top_k"], asked["n_predict"]) == (7, 0, 3, 6)
    assert asked["logit_bias"] == [{"token": 5, "bias": None}, {"token": 6, "bias": 1.5}]
    assert (asked["stop"], asked["ignore_eos"], asked["stream"]) == (["owl"], True, False)
    assert (asked["repeat_penalty"], asked["repeat_last_n"]) == (1.0, 64)
    assert completion(server)["generation_settings"]["logit_bias"] == []
    assert json.loads(completion(server, json_schema={"type": "null"})["generation_settings"]["grammar"])


def test_whether_an_answer_has_a_line_break_or_was_cut(server: Any) -> None:
    found = completion(server, grammar='root ::= "a\\n"', n_predict=9)
    assert found["content"] == "a\n" and found["has_new_line"] is True
    found = completion(server)
    assert found["has_new_line"] is ("\n" in found["content"]) and found["truncated"] is False
    assert completion(server, n_predict=-1, ignore_eos=True)["truncated"] is True


def test_only_the_fields_that_are_named(server: Any) -> None:
    names = ["content", "generation_settings/n_predict", "no/such", "timings/cache_n/deeper"]
    found = completion(server, response_fields=names)
    assert set(found) == {"content", "generation_settings/n_predict"} and found["generation_settings/n_predict"] == 6
    raw = server.post("/completion", prompt=TEXT, n_predict=2, stream=True, response_fields=["stop"]).text
    assert json.loads([event for event in raw.split("\n\n") if event][-1][6:]) == {"stop": True}
    assert error_of(server, path="/v1/completions", prompt=TEXT, response_fields=["content"])["param"] == (
        "response_fields"
    )


def test_pieces_of_streams_have_their_tokens(server: Any) -> None:
    raw = server.post("/completion", prompt=TEXT, n_predict=4, temperature=0, stream=True).text
    pieces = [json.loads(event[6:]) for event in raw.split("\n\n") if event]
    ids = [token for piece in pieces for token in piece["tokens"]]
    assert ids == completion(server, n_predict=4, return_tokens=True)["tokens"]
    found = completion(server, n_predict=2, n_probs=3)["completion_probabilities"]
    assert all(len({each["id"] for each in entry["top_logprobs"]}) == 3 for entry in found)


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_verbose_answers_show_the_prompt(server: Any, path: str) -> None:
    body = {"messages": QUESTION} if path == PATH else {"prompt": QUESTION[0]["content"]}
    body |= {"max_tokens": 3, "temperature": 0, "verbose": True}
    found = server.post(path, **body).json()
    assert QUESTION[0]["content"] in found["__verbose"]["prompt"]
    assert found["__verbose"]["generation_settings"]["n_predict"] == 3 == found["__verbose"]["tokens_predicted"]
    last = chunks_of(server, path, **body)[-1]
    assert last["__verbose"]["prompt"] == found["__verbose"]["prompt"] and last["__verbose"]["tokens_predicted"] == 3
    assert "__verbose" not in server.post(path, **{**body, "verbose": False}).json()


def test_the_tokens_of_a_conversation_are_counted(server: Any) -> None:
    found = server.post(f"{PATH}/input_tokens", messages=QUESTION).json()
    usage = server.post(PATH, messages=QUESTION, max_tokens=1).json()["usage"]
    assert found == {"object": "response.input_tokens", "input_tokens": usage["prompt_tokens"]}


def test_lists_of_models_have_both_forms(server: Any, server_that_sees: Any) -> None:
    found = server.http.get("/models").json()
    (model,) = found["models"]
    assert model["name"] == found["data"][0]["id"] == "demo" and "completion" in model["capabilities"]
    assert "multimodal" not in model["capabilities"]
    assert "multimodal" in server_that_sees.http.get("/v1/models").json()["models"][0]["capabilities"]
    assert server.http.get("/props").json()["model_path"].endswith(".gguf")


def test_prompts_with_images(server_that_sees: Any) -> None:
    server, data = server_that_sees, [base64.b64encode(picture(seed)).decode() for seed in (5, 6)]
    text = "<start_of_turn>user\n<__media__>What is this?<end_of_turn>\n<start_of_turn>model\n"
    expected = server.model.runner.generate_multimodal(text, [picture(5)], 6).text
    prompts = [{"prompt_string": text, "multimodal_data": [each]} for each in data]
    assert completion(server, prompt=prompts[0])["content"] == expected
    both = completion(server, prompt=[prompts[0], prompts[1], TEXT, {"prompt_string": TEXT}])
    assert both[0]["content"] == expected and both[2]["content"] == both[3]["content"]
    found = server.post("/v1/completions", prompt=prompts[0], temperature=0, max_tokens=6).json()
    assert found["choices"][0]["text"] == expected


def test_images_that_a_prompt_has_no_place_for(server: Any, server_that_sees: Any) -> None:
    data = base64.b64encode(picture()).decode()
    for text, images, param in (("a", [data], "prompt"), ("<__media__>", [data, data], "prompt")):
        prompt = {"prompt_string": text, "multimodal_data": images}
        error = error_of(server_that_sees, path="/completion", prompt=prompt)
        assert error["param"] == f"{param}.multimodal_data" and "<__media__>" in error["message"]
    bad = {"prompt_string": "<__media__>", "multimodal_data": ["malformed"]}
    assert "base64" in error_of(server_that_sees, path="/completion", prompt=bad)["message"]
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [data]}
    assert "takes no images" in error_of(server, path="/completion", prompt=prompt)["message"]
    assert completion(server, prompt={"prompt_string": TEXT})["content"] == completion(server)["content"]
