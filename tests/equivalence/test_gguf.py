"""The packaged GGUF model becomes one whole safetensors folder, also when two workers convert it at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from common import ROOT, SMOLLM2

CONVERT = f"from esp_worker.checkpoint import resolve; print(resolve({SMOLLM2!r}).folder)"
LOAD = """
import sys
from pathlib import Path
from esp_worker.model import load_model
model = load_model(Path(sys.argv[1]))
print(model.num_parameters, model.dtype, model.context_length)
"""


def test_two_processes_convert_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "ESPSTREAM_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CONVERT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    ended = [(process.communicate(timeout=300), process.returncode) for process in processes]
    assert all(code == 0 for _, code in ended), ended
    (folder,) = {streams[0].strip() for streams, _ in ended}
    assert {file.name for file in Path(folder).iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    models = [entry for entry in (tmp_path / "models").iterdir() if entry.is_dir()]
    assert models == [Path(folder)]  # no scratch folder is left
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, folder], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert loaded.stdout.split() == ["134515008", str(torch.float32), "8192"]
