"""docs/ray.md: its manifest is one that Ray takes, and its tables are those of the code."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text(encoding="utf-8")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture(scope="module")
def config(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    return found


def test_the_manifest_is_a_ray_service(manifest: dict[str, Any], config: dict[str, Any]) -> None:
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    cluster = manifest["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert container["image"] and container["resources"]["limits"] == container["resources"]["requests"]
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay takes strings"
    (application,) = config["applications"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert application["args"]["num_cpus"] < int(worker["resources"]["limits"]["cpu"]), "a core is left for Ray"
    assert application["args"]["replicas"][1] <= workers["maxReplicas"]
    paths = [mount["mountPath"] for mount in worker["volumeMounts"]]
    assert application["args"]["model"].startswith(tuple(paths))


@needs_ray
def test_ray_serve_takes_its_configuration(config: dict[str, Any]) -> None:
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.parse_obj(config).applications
    module, name = application.import_path.split(":")
    assert isinstance(getattr(import_module(module), name)(application.args), Application)
