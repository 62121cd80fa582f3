"""The example deployments: every manifest is valid, and says what kvxfer and vLLM understand."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from kvxfer.config import settings_from

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
HOSTS = {"p5en": ("nvidia.com/gpu", "8"), "trn2": ("aws.amazon.com/neuron", "16")}


def documents():
    for path in MANIFESTS:
        for one in yaml.safe_load_all(path.read_text()):
            yield path, one


def pods():
    """Every pod template, with where it is from; those of a LeaderWorkerSet too."""
    for path, one in documents():
        name = f"{path.stem} {one['kind']} {one['metadata']['name']}"
        if one["kind"] == "Deployment":
            yield name, one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            yield f"{name} leader", one["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
            yield f"{name} worker", one["spec"]["leaderWorkerTemplate"]["workerTemplate"]


PODS = dict(pods())
ENGINES = {name: pod for name, pod in PODS.items() if name.split()[0] in HOSTS}


def container(pod):
    (one,) = pod["spec"]["containers"]
    return one


def connector(arguments):
    """The transfer settings that an engine is given, checked as the engine would."""
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] in {"KvxferPushConnector", "KvxferPullConnector"}
    assert config["kv_role"] in {"kv_producer", "kv_consumer"}
    extra = {name: value for name, value in config["kv_connector_extra_config"].items() if name != "control_host"}
    settings_from(extra | {"control_host": "10.0.0.1"})
    return config


def check_router(arguments):
    """The router takes these arguments: it gets as far as a port that is taken."""
    from kvxfer.router.command import register

    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    secrets = {"KVXFER_CONVERSATION_SECRET": "s", "KVXFER_ADMIN_KEY": "k"}
    result = CliRunner().invoke(app, ["router", *arguments, "--help"], env=secrets)
    assert result.exit_code == 0, result.output
    known = set(
        re.findall(r"--[a-z][a-z-]+", CliRunner().invoke(app, ["router", "--help"], env={"COLUMNS": "300"}).output)
    )
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.split("=")[0] in known


def test_there_is_something_to_check():
    assert {path.stem for path in MANIFESTS} == {"router", "p5en", "trn2"}
    assert {path.stem for path in UNITS} == {"kvxfer-prefill", "kvxfer-decode", "kvxfer-router"}
    assert len(ENGINES) == 6


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_arguments_are_text(path):
    """YAML reads ``--host=::`` as a mapping."""
    for name, pod in PODS.items():
        if name.split()[0] == path.stem:
            for argument in [*container(pod).get("command", []), *container(pod)["args"]]:
                assert isinstance(argument, str), argument


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_kubernetes(path):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate checks Kubernetes' own schema"
    )
    for one in yaml.safe_load_all(path.read_text()):
        if one["kind"] == "LeaderWorkerSet":
            assert one["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
            template = one["spec"]["leaderWorkerTemplate"]
            assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
            for pod in (template["leaderTemplate"], template["workerTemplate"]):
                meta = pod["metadata"] | {"name": "x"}
                validate.validate(
                    {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]}, "1.31", strict=True
                )
        else:
            validate.validate(one, "1.31", strict=True)


def test_a_wrong_manifest_is_found():
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate checks Kubernetes' own schema"
    )
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [{"nam": "x"}]}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.31", strict=True)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_have_their_devices_probes_and_drain(name):
    pod = ENGINES[name]
    kind, *_, role = name.split()
    one = container(pod)
    config = connector(one["args"])
    device, count = HOSTS[kind]
    for what in ("requests", "limits"):
        assert one["resources"][what][device] == count
        assert one["resources"][what]["vpc.amazonaws.com/efa"] == "16"
        assert one["resources"][what]["hugepages-2Mi"]
    assert pod["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == f"{kind}.48xlarge"
    assert config["kv_connector_extra_config"]["control_host"] == "$(POD_IP)"
    assert {entry["name"] for entry in one["env"]} >= {"POD_IP", "KVXFER_SECRET", "FI_PROVIDER"}
    assert one["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    if role == "worker":
        assert "--headless" in one["args"]
        assert "readinessProbe" not in one
        return
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[probe]["httpGet"] == {"path": "/health", "port": "http"}
    slept = int(one["lifecycle"]["preStop"]["exec"]["command"][1])
    (ends,) = (int(argument.split("=")[1]) for argument in one["args"] if argument.startswith("--shutdown-timeout="))
    assert pod["spec"]["terminationGracePeriodSeconds"] > slept + ends


def test_engines_that_span_hosts_have_one_name_and_their_rank():
    for _, one in documents():
        if one["kind"] != "LeaderWorkerSet":
            continue
        template = one["spec"]["leaderWorkerTemplate"]
        halves = [container(template[half])["args"] for half in ("leaderTemplate", "workerTemplate")]
        for arguments in halves:
            assert f"--nnodes={template['size']}" in arguments
            assert "--node-rank=$(LWS_WORKER_INDEX)" in arguments
            assert connector(arguments)["engine_id"] == "$(LWS_LEADER_ADDRESS)"
        assert [one for one in halves[1] if one != "--headless"] == halves[0]


def test_services_select_pods_and_the_router_resolves_them():
    services = {
        (path.stem, one["metadata"]["name"]): one["spec"] for path, one in documents() if one["kind"] == "Service"
    }
    for kind in HOSTS:
        for role in ("prefill", "decode"):
            service = services[kind, role]
            assert service["clusterIP"] == "None"
            labels = [pod["metadata"]["labels"] for name, pod in ENGINES.items() if name.split()[0] == kind]
            wanted = {key: value for key, value in service["selector"].items() if not key.startswith("leaderworkerset")}
            assert any(wanted.items() <= some.items() for some in labels)
    arguments = container(PODS["router Deployment router"])["args"]
    for role in ("prefill", "decode"):
        assert f"--{role}-dns=http://{role}.kvxfer.svc.cluster.local:8000" in arguments
    check_router(arguments)


def test_the_router_stops_before_it_is_killed():
    pod = PODS["router Deployment router"]
    given = dict(argument.lstrip("-").split("=", 1) for argument in container(pod)["args"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > float(given["stop-delay"]) + float(given["stop-timeout"])
    probe = container(pod)["readinessProbe"]
    assert float(given["stop-delay"]) > probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units(path):
    text = path.read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *arguments = shlex.split(command)
    if program.endswith("/vllm"):
        assert connector(arguments)["kv_role"] == ("kv_producer" if "prefill" in path.stem else "kv_consumer")
        assert "KVXFER_SECRET_FILE" in text
        ends = int(arguments[arguments.index("--shutdown-timeout") + 1])
        assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > ends
    else:
        assert arguments.pop(0) == "router"
        check_router(arguments)
        stop = float(arguments[arguments.index("--stop-delay") + 1]) + float(
            arguments[arguments.index("--stop-timeout") + 1]
        )
        assert float(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > stop


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_units(path, tmp_path):
    """With programs that exist: what is checked is the unit, not this host."""
    unit = tmp_path / path.name
    unit.write_text(re.sub(r"/opt/kvxfer/bin/\w+", "/bin/true", path.read_text()).replace("User=kvxfer", "User=root"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    mine = [line for line in done.stderr.splitlines() if path.name in line]
    assert not mine, mine
