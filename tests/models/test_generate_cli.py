"""The command line: answers on stdout, one sentence and exit code 2 for what can not be done."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import chatting
from models.demo import main as demo
from models.generate import main
from models.programs import Program

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny_model(write_gguf, gguf_metadata, gguf_tensors) -> str:
    """A GGUF file whose template shows the system message and the question."""
    gguf_metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return str(write_gguf(gguf_metadata, gguf_tensors))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """As a user starts it: without a word about platforms."""
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL")}
    return subprocess.run(
        [sys.executable, "-m", "models.generate", *arguments],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_prompts_are_answered_on_stdout_alike_alone_and_together(tiny_model, capsys):
    small = ["--model", tiny_model, "--max-new-tokens", "6", "--ignore-eos", "--quiet", "--chunk", "1", "--batch", "1"]
    small += ["--temperature", "0.8", "--top-k", "9", "--seed", "5"]
    assert main([*small, "--prompt", "ab a"]) == 0
    alone = capsys.readouterr().out.strip()
    assert main([*small, "--prompt", "c", "--prompt", "ab a", "--page-size", "1", "--no-prefix-cache"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    headings = [line for line in out.splitlines() if line.startswith(("c ─", "ab a ─"))]
    assert len(headings) == 2
    assert out[out.index("ab a ─") :].partition("\n")[2].strip() == alone


def test_command_prints_answers_only_and_stays_silent_about_platforms(tiny_model):
    done = run("--model", tiny_model, "--prompt", "ab", "--max-new-tokens", "2", "--quiet", "--chunk", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


def test_command_ends_with_code_2_and_one_sentence(tmp_path):
    done = run("--model", str(tmp_path / "nowhere.gguf"), "--prompt", "x", "--quiet")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "nowhere.gguf" in done.stderr


def test_help_explains_every_option_without_loading_jax():
    code = (
        "import sys; from models.generate import main\ntry: main(['--help'])\nfinally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in (
        "--max-context-len",
        "--page-size",
        "smollm2",
        "--top-p",
        "--no-prefix-cache",
        "--implementation",
        "exit code 2",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--temperature", "nan"], "--temperature must be 0 (greedy) or a positive number, got nan"),
        (["--top-p", "1.5"], "--top-p must lie in (0, 1], got 1.5"),
        (["--page-size", "0"], "--page-size must be at least 1, got 0"),
        (["--max-context-len", "16"], "Prompt 1 of 1 has 3 tokens and asks for 64 more, but a row holds 16"),
        (["--max-context-len", "4096"], "--max-context-len 4096 is more than the 128 tokens"),
        (["--max-new-tokens", "60", "--pages", "1"], "but the whole pool has 1 pages"),
        (["--pages", "100000000"], "The KV pool would take"),
        (["--raw", "--system", "Be kind."], "A system message needs a chat template"),
        (["--prompt", ""], "A --prompt is empty"),
        (["--prompt", "\udcff"], "half of a surrogate pair"),
        (["--implementation", "triton"], "'triton' needs an NVIDIA GPU and the platform is 'cpu'; choose 'xla'"),
    ],
    ids=lambda value: " ".join(value).encode(errors="replace").decode() if isinstance(value, list) else "",
)
def test_bad_values_are_refused_before_anything_is_compiled(tiny_model, capsys, options, sentence, monkeypatch):
    monkeypatch.setattr(Program, "compile", lambda self: pytest.fail("compiled something"))
    assert main(["--model", tiny_model, "--prompt", "ab c", "--quiet", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence.lower() in err.lower()
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("window", [None, 8])
def test_models_with_window_layers_do_without_the_prefix_cache(tiny_model, monkeypatch, capsys, window):
    real, seen = chatting.load, []

    def load(*args):
        checkpoint, model = real(*args)
        config = dataclasses.replace(checkpoint.config, window=window, window_layers=(0,) if window else ())
        return dataclasses.replace(checkpoint, config=config), model

    def start_engine(model, settings, **how):
        seen.append(settings.prefix_cache)
        raise ValueError("far enough")

    monkeypatch.setattr(chatting, "load", load)
    monkeypatch.setattr(chatting, "start_engine", start_engine)
    assert main(["--model", tiny_model, "--prompt", "ab", "--quiet"]) == 2
    assert "far enough" in capsys.readouterr().err.lower()
    assert seen == [window is None]


def test_broken_and_foreign_files_are_refused(tmp_path, capsys, write_hf, hf_config, hf_tensors):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    foreign = write_hf(hf_config | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, hf_tensors, "foreign")
    silent = write_hf(hf_config, hf_tensors, "silent")
    for path, text in ((broken, "GGUF"), (foreign, "gpt2"), (silent, "tokenizer")):
        assert main(["--model", str(path), "--prompt", "x", "--quiet"]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1


def test_unknown_options_and_missing_ones_end_with_code_2(capsys):
    for arguments in (
        ["--model", "m", "--prompt", "x", "--pagesize", "3"],
        ["--prompt", "x"],
        ["--model", "m", "--seed", "a"],
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
    assert main(["--model", "m"]) == 2
    assert "give at least one --prompt" in capsys.readouterr().err


def test_demo_refuses_a_pool_without_pages(capsys):
    assert demo(["--pages", "0"]) == 2
    assert "pages must be at least 1" in capsys.readouterr().err
