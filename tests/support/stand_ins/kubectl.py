"""``kubectl`` on this machine: objects are checked, and each pod of a Job is a process.

An object may have the fields that `_SCHEMAS` lists, with values of these types; Kubernetes refuses
unknown fields and wrong types, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.stand_ins import add_host, start_job

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABELS = {"job-name": str}
_METADATA = {"name": str}
_ENV = {"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}
_POD = {
    "subdomain": str,
    "restartPolicy": str,
    "containers": [{"name": str, "image": str, "command": [str], "env": [_ENV]}],
}
_JOB = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "template": {"spec": _POD},
}
_SERVICE = {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": _LABELS}
#: Fields of each kind of object, by its version and kind.
_SCHEMAS = {
    "v1 Service": {"apiVersion": str, "kind": str, "metadata": _METADATA, "spec": _SERVICE},
    "batch/v1 Job": {"apiVersion": str, "kind": str, "metadata": _METADATA, "spec": _JOB},
}


def check(value: Any, schema: Any, path: str) -> None:
    """Refuse unknown fields and values of the wrong type."""
    if isinstance(schema, dict):
        _require(isinstance(value, dict), f"{path}: must be an object")
        for key, each in value.items():
            _require(key in schema, f"{path}: unknown field {key!r}")
            check(each, schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        _require(isinstance(value, list), f"{path}: must be a list")
        for number, each in enumerate(value):
            check(each, schema[0], f"{path}[{number}]")
    else:
        _require(type(value) is schema, f"{path}: {value!r} is no {schema.__name__}")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise SystemExit(f"error: {text}")


class Cluster:
    """Objects of the cluster, each in a file named ``kind.name``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects = folder / "objects"

    def get(self, kind: str, name: str) -> Any:
        """Return an object; None if there is none."""
        file = self._objects / f"{kind}.{name}"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def all(self, kind: str) -> Iterator[Any]:
        for file in sorted(self._objects.glob(f"{kind}.*")):
            yield json.loads(file.read_text(encoding="utf-8"))

    def put(self, kind: str, name: str, value: Any) -> None:
        _require(_NAME.fullmatch(name) is not None, f"{name!r} is no name for a {kind}")
        (self._objects / f"{kind}.{name}").write_text(json.dumps(value), encoding="utf-8")

    def log(self, pod: str) -> Path:
        return self.folder / f"log.{pod}"


def create_secret(cluster: Cluster, name: str, source: str) -> None:
    """Do ``create secret generic NAME --from-file=KEY=FILE``."""
    key, _, file = source.removeprefix("--from-file=").partition("=")
    cluster.put("secret", name, {key: Path(file).read_text(encoding="utf-8")})
    print(f"secret/{name} created")


def apply(cluster: Cluster, file: str) -> None:
    """Do ``apply -f FILE``: make its objects, and start its Jobs in the background."""
    objects = list(yaml.safe_load_all(Path(file).read_text(encoding="utf-8")))
    for each in objects:
        kind = f"{each.get('apiVersion')} {each.get('kind')}"
        _require(kind in _SCHEMAS, f"the stand-in does not implement {kind}")
        check(each, _SCHEMAS[kind], each["kind"])
    for each in objects:
        if each["kind"] == "Job":
            _check_job(each["spec"])
        cluster.put(each["kind"].lower(), each["metadata"]["name"], each)
    for each in objects:
        name = each["metadata"]["name"]
        if each["kind"] == "Job":
            command = [sys.executable, __file__, str(cluster.folder), "control", name]
            start_job(cluster.folder, name, command, cluster.folder / f"control.{name}")
        print(f"{'job.batch' if each['kind'] == 'Job' else each['kind'].lower()}/{name} created")


def _check_job(spec: Any) -> None:
    indexed = "the stand-in only implements indexed Jobs with completions and parallelism"
    _require(spec.get("completionMode") == "Indexed", indexed)
    _require(0 < spec.get("parallelism", 0) <= spec.get("completions", 0), indexed)
    pod = spec["template"]["spec"]
    _require(
        pod.get("restartPolicy") == "Never" and spec.get("backoffLimit") == 0,
        "the stand-in restarts no pod: restartPolicy: Never, backoffLimit: 0",
    )
    _require(len(pod["containers"]) == 1, "the stand-in runs one container in each pod")


def control(cluster: Cluster, name: str) -> int:
    """Run the pods of a Job as its controller does; return 0 if all of them succeeded."""
    spec = cluster.get("job", name)["spec"]
    waiting = list(range(spec["completions"]))
    running: dict[int, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < spec["parallelism"]:
            process = _start_pod(cluster, name, spec["template"]["spec"], waiting.pop(0))
            running[process.pid] = process
        pid, status = os.wait()
        running.pop(pid)
        if status:
            for each in running.values():
                each.terminate()
            return 1
    return 0


def _start_pod(cluster: Cluster, job: str, pod: Any, index: int) -> subprocess.Popen[bytes]:
    [container] = pod["containers"]
    host = f"{job}-{index}"
    _publish(cluster, job, host, pod.get("subdomain", ""))
    image = cluster.get("image", container["image"])
    _require(image is not None, f"pod {host}: ErrImagePull: {container['image']}")
    env = {each["name"]: _value(cluster, each) for each in container["env"]}
    given = {"HOSTNAME": host, "JOB_COMPLETION_INDEX": str(index)}
    with cluster.log(host).open("wb") as out:
        return subprocess.Popen(
            container["command"], cwd=image["folder"], env={**image["env"], **given, **env},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _value(cluster: Cluster, variable: Any) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]["secretKeyRef"]
    secret = cluster.get("secret", source["name"])
    _require(
        secret is not None and source["key"] in secret,
        f"CreateContainerConfigError: no key {source['key']} in secret {source['name']}",
    )
    return str(secret[source["key"]])


def _publish(cluster: Cluster, job: str, host: str, subdomain: str) -> None:
    """Give a pod its name ``HOST.SUBDOMAIN`` if a headless Service of this name selects it."""
    for service in cluster.all("service"):
        spec = service["spec"]
        is_headless = spec.get("clusterIP") == "None"
        is_selected = spec.get("selector") == {"job-name": job}
        if is_headless and is_selected and service["metadata"]["name"] == subdomain:
            add_host(cluster.folder, f"{host}.{subdomain}")


def wait(cluster: Cluster, timeout: str, job: str) -> int:
    """Do ``wait --for=condition=complete --timeout=10m job/JOB``; a failed Job never completes."""
    minutes = re.fullmatch(r"--timeout=(\d+)m", timeout)
    _require(minutes is not None and job.startswith("job/"), "--timeout=MINUTES and job/JOB needed")
    ended = cluster.folder / "ended" / job.removeprefix("job/")
    until_s = time.monotonic() + 60 * int(minutes[1])
    while not ended.exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    if not ended.exists() or ended.read_text().strip() != "0":
        print(f"error: timed out waiting for the condition on jobs/{job}", file=sys.stderr)
        return 1
    print(f"job.batch/{job.removeprefix('job/')} condition met")
    return 0


def logs(cluster: Cluster, job: str) -> None:
    """Do ``logs -l job-name=JOB``: print what its pods have written."""
    for index in range(cluster.get("job", job)["spec"]["completions"]):
        print(cluster.log(f"{job}-{index}").read_text(encoding="utf-8"), end="")


def main(folder: Path, argv: list[str]) -> int:
    """Run a command of ``kubectl``, or the controller of a Job."""
    cluster = Cluster(folder)
    match argv:
        case ["create", "secret", "generic", name, source] if source.startswith("--from-file="):
            create_secret(cluster, name, source)
        case ["apply", "-f", file]:
            apply(cluster, file)
        case ["wait", "--for=condition=complete", timeout, job] if timeout.startswith("--timeout="):
            return wait(cluster, timeout, job)
        case ["logs", "-l", selector] if selector.startswith("job-name="):
            logs(cluster, selector.removeprefix("job-name="))
        case ["control", name]:
            return control(cluster, name)
        case _:
            raise SystemExit(f"error: the stand-in does not implement {' '.join(argv)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
