"""deploy/ray.yaml, deploy/kubernetes.yaml and kustomizations of it, against their schemas and
LinPix's settings.
"""

import importlib
import re
import shutil

import kubernetes_validate
import pytest
import yaml

from linpix.server.origins import Origins
from linpix.server.settings import Settings
from tools.harness.commands import ROOT, ran

OBJECTS = {
    found["kind"]: found
    for found in yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
}
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def environment(container: dict, namespace: str) -> dict[str, str]:
    """The variables of LinPix, as Kubernetes fills them in."""
    found: dict[str, str] = {}
    for variable in container["env"]:
        if "valueFrom" in variable:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
        value = variable.get("value", namespace)
        # only earlier ones
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return {name: value for name, value in found.items() if name.startswith("LINPIX_")}


ENVIRONMENT = environment(CONTAINER, "default")


@pytest.mark.parametrize("version", ["1.27", "1.33", "1.37"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_kubernetes_takes_each_object(kind, version):
    kubernetes_validate.validate(OBJECTS[kind], version, strict=True)


def test_the_objects_belong_together():
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    assert OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    scaled = OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert scaled["name"] == OBJECTS["Deployment"]["metadata"]["name"]
    [port] = CONTAINER["ports"]
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert "replicas" not in OBJECTS["Deployment"]["spec"], "the autoscaler has them"


def test_a_pod_has_the_settings_probes_and_time_that_the_server_needs():
    settings = Settings(
        **{name.removeprefix("LINPIX_").lower(): value for name, value in ENVIRONMENT.items()}
    )
    assert {name.removeprefix("LINPIX_").lower() for name in ENVIRONMENT} <= set(
        Settings.model_fields
    )
    # Debian's, which the image has
    sleep, pause = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert (
        sleep == "sleep"
        and POD["terminationGracePeriodSeconds"] >= int(pause) + settings.drain_timeout + 10
    )
    assert {
        CONTAINER[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness")
    } == {"/readyz"}
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/healthz"
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"USER {POD['securityContext']['runAsUser']}:" in dockerfile
    assert f"EXPOSE {CONTAINER['ports'][0]['containerPort']}" in dockerfile
    assert settings.upload_space <= 512 * 2**20


def test_a_pod_answers_to_every_name_of_its_service_in_its_own_namespace():
    origins = Origins("0.0.0.0", environment(CONTAINER, "pictures")["LINPIX_ALLOWED_HOSTS"])
    for name in (
        "linpix",
        "linpix.pictures",
        "linpix.pictures.svc",
        "linpix.pictures.svc.cluster.local",
        "10.1.2.3",
    ):
        assert origins.refusal("GET", "/", {"host": f"{name}:80"}) is None
    for name in ("linpix.default", "other.pictures", "linpix.example"):
        assert origins.refusal("GET", "/", {"host": name})


def kustomized(folder: str) -> dict[str, dict]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize, is not installed")
    made = ran(f"kubectl kustomize {ROOT}/{folder}")
    assert made.returncode == 0 and not made.stderr, made.stderr
    return {found["kind"]: found for found in yaml.safe_load_all(made.stdout)}


def test_the_base_of_kustomizations_is_the_manifest():
    assert kustomized("deploy") == OBJECTS


def test_the_example_of_a_kustomization_has_an_image_a_namespace_and_keys():
    objects = kustomized("examples/kubernetes")
    assert objects.keys() == OBJECTS.keys()
    for found in objects.values():
        kubernetes_validate.validate(found, "1.33", strict=True)
        assert found["metadata"]["namespace"] == "pictures"
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "registry.example.com/linpix:cpu"
    settings = Settings(
        **{
            name.removeprefix("LINPIX_").lower(): value
            for name, value in environment(container, "pictures").items()
        }
    )
    [mounted] = [
        mount
        for mount in container["volumeMounts"]
        if str(settings.api_keys).startswith(mount["mountPath"])
    ]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == mounted["name"]]
    # which a file of keys may have
    assert volume["secret"] == {"secretName": "linpix-keys", "defaultMode": 0o440}
    assert (
        "linpix-keys"
        in (ROOT / "examples/kubernetes/kustomization.yaml").read_text().split("apiVersion")[0]
    )


def test_it_scales_by_a_metric_that_there_is():
    [metric] = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert f'"{metric["pods"]["metric"]["name"]}"' in (ROOT / "server/metrics.py").read_text()


def test_ray_serve_takes_its_file_and_builds_what_it_names():
    schema = pytest.importorskip(
        "ray.serve.schema", reason="the extra is not installed: pip install '.[ray]'"
    )
    config = yaml.safe_load((ROOT / "deploy/ray.yaml").read_text())
    schema.ServeDeploySchema(**config)
    assert config["proxy_location"] == "Disabled", "fronts listen themselves"
    [found] = config["applications"]
    module, name = found["import_path"].split(":")
    built = getattr(importlib.import_module(module), name)(found["args"])
    assert set(found["args"]) <= set(Settings.model_fields)
    assert built._bound_deployment.name == "Front"
    deployments = {deployment["name"]: deployment for deployment in found["deployments"]}
    assert set(deployments) == {"Engine", "Front"}
    for deployment in found["deployments"]:
        assert "ray_actor_options" not in deployment, (
            "they would replace the app's, environment included"
        )
    _, engines = built._bound_deployment.init_args
    options = engines._bound_deployment.ray_actor_options
    assert options["num_cpus"] == found["args"]["replica_threads"]
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == str(
        found["args"]["replica_threads"]
    )
    scaling = deployments["Engine"]["autoscaling_config"]
    assert scaling["look_back_period_s"] > scaling["metrics_interval_s"], (
        "else it decides by old numbers"
    )
    module, name = scaling["policy"]["policy_function"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
