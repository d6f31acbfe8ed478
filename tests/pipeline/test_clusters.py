"""examples/slurm and examples/kubernetes: the script saves and queues itself again at SIGTERM, and goes on; the job is a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from qad.recipes.load import load_recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = """
model: {model}
dtype: float32
calibrate: {{data: {{source: random}}, samples: 2, seq_len: 64}}
train:
  data: {{source: random}}
  tokens: {tokens}
  seq_len: 64
  batch_size: 4
  validation_tokens: 128
  validate_every: 50
  save_every: 100000
"""
STAND_INS = {
    "srun": '#!/usr/bin/env bash\nshift\nexec "$@"\n',
    "scontrol": '#!/usr/bin/env bash\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi\n',
}


def steps(out: Path) -> int:
    log = out / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.is_file() else 0


@pytest.mark.pipeline
def test_the_script_of_slurm_saves_is_queued_again_and_goes_on(tiny_llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(model=tiny_llama_dir, tokens=256 * 400))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(EXAMPLES.parent),
        "QAD_COMPILE": "0",
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
    }
    command = ["bash", str(EXAMPLES / "slurm" / "run.sbatch"), str(recipe), str(out)]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        for _ in range(600):
            if steps(out) > 3 or job.poll() is not None:
                break
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) != 0, (tmp_path / "log").read_text()[-2000:]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    (state,) = (out / "arms" / "qad.partial").glob("state-*")
    saved = int(state.name.partition("-")[2])
    assert 0 < saved < 400
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(401))
    assert (out / "export" / "qad" / "config.json").is_file()


def test_the_recipe_and_the_job_are_ones() -> None:
    assert load_recipe(str(EXAMPLES / "slurm" / "recipe.yaml")).training.steps == 476
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][0] == "torchrun"
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["command"]
    grace = int(next(word for word in container["command"] if word.startswith("--shutdown-timeout")).partition("=")[2])
    assert grace < pod["terminationGracePeriodSeconds"]
