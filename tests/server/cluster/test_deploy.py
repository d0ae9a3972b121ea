"""deploy/ray.yaml, deploy/kubernetes.yaml and kustomizations of it, with and without the operators
that a cluster may have, against their schemas and LinPix's settings.
"""

import importlib
import os
import re
import shutil

import jsonschema
import kubernetes_validate
import pytest
import yaml

from linpix.server.origins import Origins
from linpix.server.settings import Settings
from tests.server.test_dashboard import METRICS, SELECTOR
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
    """folder: of the tree, or an absolute path."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize, is not installed")
    made = ran(f"kubectl kustomize {ROOT / folder}")
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


def fields(required: str, **of_schemas: object) -> dict:
    """The schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": of_schemas,
    }


def some(schema: dict) -> dict:
    return {"type": "array", "items": schema, "minItems": 1}


def resource(version: str, **spec: object) -> dict:
    metadata = fields("name", name=TEXT, namespace=TEXT, labels=TEXTS)
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind=TEXT,
        metadata=metadata,
        spec=fields(" ".join(spec), **spec),
    )


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
TIME = {"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$"}
RULE = fields("alert expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": TIME})
# Those fields of the operators' own schemas that LinPix uses, as they are in prometheus-operator
# 0.90 and KEDA 2.22: what is misspelt or misplaced there is refused, or ignored.
SCHEMAS = {
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1",
        selector=fields("matchLabels", matchLabels=TEXTS),
        jobLabel=TEXT,
        endpoints=some(
            fields("port", port=TEXT, path=TEXT, interval=TIME, scrapeTimeout=TIME),
        ),
    ),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1", groups=some(fields("name rules", name=TEXT, rules=some(RULE)))
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        scaleTargetRef=fields("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        pollingInterval=COUNT,
        advanced=fields(
            "",
            horizontalPodAutoscalerConfig=fields(
                "", behavior=fields("", scaleDown=fields("", stabilizationWindowSeconds=COUNT))
            ),
        ),
        triggers=some(
            fields(
                "type metadata",
                type={"const": "prometheus"},
                metadata=fields(
                    "serverAddress query threshold",
                    serverAddress=TEXT,
                    query=TEXT,
                    threshold=TEXT,
                    ignoreNullValues=TEXT,
                ),
            )
        ),
    ),
}


@pytest.fixture(scope="module")
def operated(tmp_path_factory):
    """What the example makes once its line of components counts."""
    folder = tmp_path_factory.mktemp("operated")
    text = (ROOT / "examples/kubernetes/kustomization.yaml").read_text()
    text = text.replace("# components:", "components:")
    deploy = os.path.relpath(ROOT / "deploy", folder.resolve())
    (folder / "kustomization.yaml").write_text(text.replace("../../deploy", deploy))
    return kustomized(str(folder))


def test_operators_get_resources_of_their_own_and_one_autoscaler_is_left(operated):
    assert operated.keys() == OBJECTS.keys() - {"HorizontalPodAutoscaler"} | SCHEMAS.keys()
    for kind, schema in SCHEMAS.items():
        jsonschema.validate(operated[kind], schema)
        assert operated[kind]["metadata"]["namespace"] == "pictures"
    for kind in operated.keys() - SCHEMAS.keys():
        kubernetes_validate.validate(operated[kind], "1.33", strict=True)


def test_the_operator_scrapes_as_prometheus_does_beside_one_server(operated):
    spec, service = operated["ServiceMonitor"]["spec"], operated["Service"]
    [endpoint] = spec["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert spec["selector"]["matchLabels"] == service["metadata"]["labels"]
    beside = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == (
        beside["global"]["scrape_interval"],
        beside["global"]["scrape_timeout"],
    )
    [job] = beside["scrape_configs"]
    assert service["metadata"]["labels"][spec["jobLabel"]] == job["job_name"]


def test_the_operator_has_the_same_alerts():
    alerts = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    rules = yaml.safe_load((ROOT / "deploy/prometheus-operator/rules.yaml").read_text())
    assert rules["spec"] == alerts


def test_keda_scales_the_deployment_as_the_autoscaler_that_it_replaces(operated):
    spec, before = operated["ScaledObject"]["spec"], OBJECTS["HorizontalPodAutoscaler"]["spec"]
    [trigger] = spec["triggers"]
    [metric] = before["metrics"]
    [(name, labels)] = SELECTOR.findall(trigger["metadata"]["query"])
    assert name in METRICS and labels == 'job="linpix"'
    assert (name, trigger["metadata"]["threshold"]) == (
        metric["pods"]["metric"]["name"],
        metric["pods"]["target"]["averageValue"],
    )
    assert spec["scaleTargetRef"]["name"] == operated["Deployment"]["metadata"]["name"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (
        before["minReplicas"],
        before["maxReplicas"],
    )
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == before["behavior"]


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
