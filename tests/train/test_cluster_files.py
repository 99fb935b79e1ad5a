"""The Slurm scripts and the Kubernetes manifest of docs/ pass validators and start the command."""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "docs").glob("*.slurm"))
MANIFEST = ROOT / "docs" / "pytorchjob.yaml"
SCHEMA = ROOT / "tests" / "golden" / "pytorchjob_schema.json"

# --- Slurm: shellcheck and the options of sbatch --------------------------------------------------

NUMBER, WORD = r"[1-9]\d*", r"[\w.-]+"
TIME = r"(\d+-)?\d{1,2}(:\d{2}){0,2}"
# Options of sbatch (its manual page, version 24.05) and the form of their values.
SBATCH: dict[str, str | None] = {
    "array": r"\d+(-\d+)?(:\d+)?(,\d+(-\d+)?)*(%\d+)?",
    "cpus-per-task": NUMBER,
    "gpus-per-node": rf"({WORD}:)?{NUMBER}",
    "job-name": WORD,
    "nodes": rf"{NUMBER}(-{NUMBER})?",
    "ntasks-per-node": NUMBER,
    "open-mode": "append|truncate",
    "requeue": None,
    "signal": r"([RB]:)?(USR1|USR2|TERM|INT|HUP|\d+)(@\d+)?",
    "time": TIME,
}


def sbatch_errors(text: str) -> list[str]:
    """Return what sbatch would reject or ignore in the header of a script."""
    errors, is_header, seen = [], True, set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#"):
            is_header = is_header and not line.strip()
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        if not line.startswith("#SBATCH"):
            continue
        name, value = match.groups() if match else ("", None)
        if not is_header:
            errors.append(f"{number}: ignored after the first command")
        elif name not in SBATCH or name in seen:
            errors.append(f"{number}: unknown or repeated option: {line}")
        elif (form := SBATCH[name]) is None or value is None:
            errors += [f"{number}: value missing or not allowed"] if form != value else []
        elif not re.fullmatch(form, value):
            errors.append(f"{number}: wrong value {value}")
        seen.add(name)
    return errors


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_options_are_valid(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert text.count("#SBATCH") > 5
    assert sbatch_errors(text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--time=04:00:00", "--time=four"),
        ("--requeue", "--requeue=yes"),
        ("--nodes=1", "--node=1"),
        ("--nodes=1", "--nodes"),
        ("#SBATCH --requeue", "set -e\n#SBATCH --requeue"),
        ("#SBATCH --requeue", "#SBATCH --requeue\n#SBATCH --requeue"),
        ("B:USR1@180", "B:USR1@three"),
    ],
)
def test_wrong_slurm_options_are_found(old: str, new: str) -> None:
    text = (ROOT / "docs" / "elastic.slurm").read_text()
    assert old in text
    assert len(sbatch_errors(text.replace(old, new, 1))) >= 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(script: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; apt-get install shellcheck")
    subprocess.run(["shellcheck", str(script)], check=True)
    broken = tmp_path / "broken.sh"
    broken.write_text(script.read_text().replace('"$out"', "$out"))
    assert subprocess.run(["shellcheck", str(broken)], capture_output=True).returncode == 1


# --- the array script with stand-ins for Slurm's programs and torchrun ----------------------------

TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > torchrun-$SLURM_JOB_ID.txt
env | grep -E '^(TORCH_|COMPRESSIVE_)' | sort > environment.txt
trap "echo saved > saved.txt; exit 143" TERM
for _ in $(seq $WAIT); do sleep 0.05; done
exit $CODE
"""
SQUEUE = '#!/bin/bash\nfor word; do :; done\ngrep -x "$word" running.txt\n'
SCONTROL = '#!/bin/bash\necho "$@" >> requeued.txt\n'
WORDS = ["/data/imagenet", "c-byol/imagenet-r50-300", "runs/a b", "--seed", "1"]
ELASTIC = ROOT / "docs" / "elastic.slurm"


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    for name, text in (("torchrun", TORCHRUN), ("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "running.txt").write_text("")
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "123",
        "SLURM_ARRAY_JOB_ID": "120",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "WAIT": "0",
        "CODE": "0",
    }


def test_a_run_on_storage_has_its_rendezvous_where_sbatch_was_called(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    values = cluster | {"SLURM_SUBMIT_DIR": str(tmp_path / "submitted")}
    words = [*WORDS[:2], "s3://bucket/runs/a", *WORDS[3:]]
    subprocess.run([ELASTIC, *words], cwd=tmp_path, env=values, check=True)
    assert "s3://bucket/runs/a" in (tmp_path / "torchrun-123.txt").read_text().splitlines()
    assert [path.name for path in (tmp_path / "submitted").iterdir()] == ["a.rendezvous.lock"]
    assert not (tmp_path / "s3:").exists()


def torchrun_options(folder: Path, job: str) -> dict[str, str]:
    given = (folder / f"torchrun-{job}.txt").read_text().splitlines()
    start = given.index("-m")
    assert given[start:] == [
        *("-m", "compressive", "pretrain", "/data/imagenet"),
        *("--recipe", "c-byol/imagenet-r50-300", "--out", "runs/a b", "--seed", "1"),
    ]
    return dict(zip(given[:start:2], given[1:start:2], strict=True))


def test_first_task_holds_the_rendezvous_and_others_join(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    first = subprocess.Popen([ELASTIC, *WORDS], cwd=tmp_path, env=cluster | {"WAIT": "1000"})
    try:
        wait_for(tmp_path / "torchrun-123.txt")
        (tmp_path / "running.txt").write_text("123\n")
        second = cluster | {"SLURM_JOB_ID": "124"}
        subprocess.run([ELASTIC, *WORDS], cwd=tmp_path, env=second, check=True)
        (host, joined) = (torchrun_options(tmp_path, job) for job in ("123", "124"))
        assert host["--nnodes"] == joined["--nnodes"] == "1:4"
        assert host["--rdzv-endpoint"] == joined["--rdzv-endpoint"]
        assert host["--rdzv-endpoint"].endswith(":20123")
        assert host["--rdzv-id"] == joined["--rdzv-id"] == "120"
        assert host["--rdzv-conf"].startswith("is_host=1,")
        assert joined["--rdzv-conf"].startswith("is_host=0,")
        assert "COMPRESSIVE_SPARE_PROCESSES=wait" in (tmp_path / "environment.txt").read_text()
        assert not (tmp_path / "requeued.txt").exists()
        first.send_signal(signal.SIGUSR1)  # three minutes before the time limit
        assert first.wait(30) == 0
        assert (tmp_path / "saved.txt").exists()
        assert (tmp_path / "requeued.txt").read_text() == "requeue 123\n"
    finally:
        first.kill()
        first.wait()
    # The next task to start holds the rendezvous, even if the file of a killed one remains.
    (tmp_path / "running.txt").write_text("")
    (tmp_path / "runs" / "a b.rendezvous").write_text("123 gone:20123\n")
    third = cluster | {"SLURM_JOB_ID": "125"}
    subprocess.run([ELASTIC, *WORDS], cwd=tmp_path, env=third, check=True)
    assert torchrun_options(tmp_path, "125")["--rdzv-endpoint"].endswith(":20125")


@pytest.mark.parametrize("is_running", [True, False])
def test_task_is_requeued_only_if_the_host_has_left(
    is_running: bool, tmp_path: Path, cluster: dict[str, str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a b.rendezvous").write_text("99 node9:20099\n")
    (tmp_path / "running.txt").write_text("99\n")
    # The stand-in removes the host from the list of running jobs while torchrun fails.
    if not is_running:
        text = TORCHRUN.replace("exit $CODE", "echo > running.txt; exit $CODE")
        (tmp_path / "torchrun").write_text(text)
    done = subprocess.run([ELASTIC, *WORDS], cwd=tmp_path, env=cluster | {"CODE": "1"})
    assert done.returncode == (1 if is_running else 0)
    assert (tmp_path / "requeued.txt").exists() != is_running


def wait_for(path: Path, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.3)  # until the traps are set


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def schema_errors(document: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    return [error.message for error in validator.iter_errors(document)]


def test_manifest_fits_the_schema_of_pytorchjob(manifest: dict[str, Any]) -> None:
    assert schema_errors(manifest) == []


WORKER = "spec.pytorchReplicaSpecs.Worker"
CONTAINER = f"{WORKER}.template.spec.containers.0"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("apiVersion", "kubeflow.org/v2"),
        ("spec.elasticPolicy.minReplica", 1),
        ("spec.elasticPolicy.maxRestarts", "100"),
        ("spec.elasticPolicy.rdzvBackend", "tcp"),
        ("spec.nprocPerNode", 8),
        (f"{WORKER}.restartPolicy", "Sometimes"),
        (f"{WORKER}.replicas", "4"),
        (f"{CONTAINER}.commands", ["torchrun"]),
        (f"{CONTAINER}.command", "torchrun"),
        (f"{CONTAINER}.env.0.value", 1),
        (f"{CONTAINER}.volumeMounts.0.path", "/data"),
        (f"{WORKER}.template.spec.terminationGracePeriodSeconds", "180"),
        (f"{WORKER}.template.spec.volumes.0.persistentVolumeClaim.claim", "x"),
    ],
)
def test_wrong_fields_are_found(place: str, value: Any, manifest: dict[str, Any]) -> None:
    document = copy.deepcopy(manifest)
    *path, last = place.split(".")
    target: Any = document
    for name in path:
        target = target[int(name) if isinstance(target, list) else name]
    target[last] = value
    assert len(schema_errors(document)) >= 1


def test_manifest_agrees_with_itself(manifest: dict[str, Any]) -> None:
    """Every mount has a volume, GPUs equal processes, and the operator's container name is used."""
    spec = manifest["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    limits = container["resources"]["limits"]
    assert str(limits["nvidia.com/gpu"]) == spec["nprocPerNode"]
    policy = spec["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    values = {each["name"]: each["value"] for each in container["env"]}
    grace = pod["terminationGracePeriodSeconds"]
    assert int(values["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace


def test_manifest_starts_a_known_command(manifest: dict[str, Any]) -> None:
    from typer.testing import CliRunner

    from compressive.cli.app import app

    pod = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    words = pod["containers"][0]["command"] + pod["containers"][0]["args"]
    assert words[:3] == ["torchrun", "-m", "compressive"]
    found = CliRunner().invoke(app, words[3:])
    # All arguments are accepted; only the images are not here.
    assert "/data/imagenet" in found.output
    assert found.exit_code == 2
