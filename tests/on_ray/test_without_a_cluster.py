"""What of `rlx.ray` can be tested in one process: options, the router's choice, the rows of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.ray
from rlx import demo as rlx_demo
from rlx.errors import ArgumentError
from rlx.ray.data import Texts
from rlx.serve import ServerOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own use of pydantic
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")


@pytest.mark.parametrize("name", rlx.ray.__all__)
def test_without_the_extra_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.ray.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r'pip install "rlx\[ray\]"'):
        getattr(rlx.ray, name)


@needs_ray
def test_a_deployment_has_the_options_of_the_engine() -> None:
    from ray.serve import Application

    app = rlx.ray.deployment("demo", num_cpus=3, replicas=(1, 4), slots=8, server=ServerOptions(queue=5, alias=("m",)))
    assert isinstance(app, Application)
    front = app._bound_deployment
    (inner,) = (each for each in front.init_args if isinstance(each, Application))
    replica = inner._bound_deployment
    assert replica.ray_actor_options["num_cpus"] == 3
    assert (replica.max_ongoing_requests, replica.max_queued_requests) == (16, 5)
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 8)
    model, names, server, options = replica.init_args
    assert (model, list(names), options["threads"], options["slots"]) == ("demo", ["m", "demo"], 3, 8)
    assert not server.is_local, "clients name Ray's proxies, not the replica"
    assert server.queue >= 16, "the application in a replica refuses nothing that the router gave it"


@needs_ray
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"threads": 2}, "num_cpus="), ({"slots": 0}, "slots"), ({"num_cpus": 0}, "num_cpus"),
        ({"replicas": 0}, "replicas"), ({"nonsense": 1}, "nonsense"), ({"ingress_replicas": 0}, "ingress_replicas"),
    ],
)  # fmt: skip
def test_wrong_options_of_a_deployment_are_told_before_it_starts(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises((ArgumentError, TypeError), match=text):
        rlx.ray.deployment("demo", **wrong)


@needs_ray
@pytest.mark.parametrize(
    "wrong", [{"temprature": 1}, {"batch_size": 0}, {"engine": {"slots": 0}}, {"replicas": (0, 1)}]
)
def test_wrong_options_of_generate_are_told_before_it_starts(wrong: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, TypeError)):
        rlx.ray.generate(None, "demo", **wrong)


@needs_ray
def test_the_router_ranks_replicas_by_prefix_and_load() -> None:
    from rlx.ray.serving import PrefixRouter

    def request(keys: list[int]) -> Any:
        return SimpleNamespace(kwargs={"keys": keys}, routing_context=SimpleNamespace(should_backoff=False))

    router = object.__new__(PrefixRouter)
    router.initialize_state(imbalance=2)
    ids = {name: SimpleNamespace(unique_id=name) for name in "abc"}
    loads = {"a": 1, "b": 0, "c": 5}
    router._replica_queue_len_cache = SimpleNamespace(get=lambda each: loads[each.unique_id])
    replicas = [SimpleNamespace(replica_id=each) for each in ids.values()]

    def order(keys: list[int]) -> list[str]:
        one = request(keys)
        ranks = asyncio.run(router.choose_replicas(replicas, one))
        assert one.routing_context.should_backoff and all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]

    assert order([7]) == ["b", "a", "c"]
    router.on_request_routed(request([7, 8]), ids["a"], None)
    assert order([7, 9]) == ["a", "b", "c"]
    loads["a"] = 3
    assert order([7, 9])[0] == "b"
    assert len(asyncio.run(router.choose_replicas(replicas, None))[0]) == 3


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    with rlx.auto_runner("demo", deterministic=True) as runner:
        yield runner


def rows(options: dict[str, Any] | None = None, **more: Any) -> Any:
    pytest.importorskip("pyarrow")
    from rlx.ray.data import Rows

    names = {"column": "prompt", "output": "answer", "chat": None, "max_tokens": 20, **more}
    return Rows("demo", {"slots": 4, "deterministic": True}, options or {}, **names)


def test_rows_get_the_answers_of_one_process(runner: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    texts = [f"What is {i} + {2 * i}?" for i in range(12)]
    prompts = [*texts, "x " * 5_000, None]
    found = rows()(pa.table({"id": list(range(14)), "prompt": prompts})).to_pylist()
    expected = [runner.chat(text, 20) for text in texts]
    assert [row["answer"] for row in found[:12]] == [answer.text for answer in expected]
    assert [row["answer_tokens"] for row in found[:12]] == [len(answer.ids) for answer in expected]
    assert [row["answer_prompt_tokens"] for row in found[:12]] == [answer.prompt_tokens for answer in expected]
    assert [row["id"] for row in found] == list(range(14)), "the rows stay in their order"
    assert found[0]["answer_error"] is None and found[0]["answer_finish_reason"] == "stop"
    assert found[12]["answer"] is None and "context" in found[12]["answer_error"]
    assert "expected a text" in found[13]["answer_error"]


def test_the_vectors_of_a_batch_of_rows(goldens: Path) -> None:
    path = str(goldens / "bert" / "hf")
    actor = Texts(path, {"threads": 1}, {"dimensions": 8}, "text", "vector")
    batch = {"id": np.array([4, 5]), "text": np.array(["yes", "no"], object)}
    found = actor(batch)
    with rlx.auto_runner(path, threads=1) as runner:
        np.testing.assert_array_equal(found["vector"], runner.embed(["yes", "no"], dimensions=8))
    assert found["id"].tolist() == [4, 5]
    for column, output, what in (("body", "vector", "no column 'body'"), ("text", "id", "a column 'id' already")):
        with pytest.raises(ArgumentError, match=what):
            Texts(path, {"threads": 1}, {}, column, output)(batch)
    with pytest.raises(rlx.UnsupportedModelError, match="no embedding model"):
        Texts(str(rlx_demo.path()), {"threads": 1}, {}, "text", "vector")
