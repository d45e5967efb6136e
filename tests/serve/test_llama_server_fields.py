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


def test_what_editors_send_is_filled_in(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields are those of llama.vim."""
    body = {
        "id_slot": 0, "input_prefix": "Once upon", "prompt": " a", "input_suffix": " fox", "n_predict": 4, "stop": [],
        "input_extra": [{"text": "x", "time": 1, "filename": "a.py"}], "n_indent": 4, "top_k": 40, "top_p": 0.9,
        "samplers": ["top_k", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "prompt"],
    }  # fmt: skip
    assert error_of(server, path="/infill", **body)["param"] == "input_suffix"
    monkeypatch.setattr("rlx.serve.prompts.fill_in_ids", lambda tokenizer: tokenizer.encode("ABC"))
    answer = server.post("/infill", **body)
    assert answer.json()["prompt"] == "a.py\nx\nAOnce upon aB foxC" and answer.json()["content"], answer.text
    assert set(answer.headers[IGNORED].split(", ")) == {
        "id_slot", "n_indent", "samplers", "t_max_prompt_ms", "t_max_predict_ms"
    }  # fmt: skip
