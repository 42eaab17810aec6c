"""python -m benchmarks NAME [--json FILE] [--quick]: measure, print a table, and keep the figures as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from models.startup import has_nvidia_driver, import_jax

NAMES = {
    "ledger": "each allocator operation, in-graph and as a call of its own, at two pool sizes",
    "write": "a KV write in every dtype, 2^12 to 2^20 slots",
    "decode": "the same decoder on paged pools and on a contiguous cache",
    "compiled": "alias bytes, temporary bytes and kernels of the compiled programs (CPU and, deviceless, H200)",
    "kernels": "attention, KV writes and the ledger on a GPU: kernels, XLA, JAX's own, and a device copy",
    "tune": "search the kernels' configs for this machine's GPU and keep the fastest in the folder of --tuning",
    "swa": "pages held per layer kind while a sequence grows, and tokens served by a budget, with sliding windows",
    "replay": "radix cache and ledger on a real trace, and one scheduling step",
    "smollm2": "prefill and decode of SmolLM2-135M, batch 1 and 6, and its bare matmuls",
    "against_torch": "the same beside torch with transformers' generate (KVJAX_TORCH_PYTHON names its Python)",
}


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    listing = "\n".join(f"  {name:13} {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of kvjax. Times of one run are comparable with each other, not with another run's.",
        epilog=f"names:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, help="what to measure")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write a list of {name, value, unit, config}; without a file: to stdout, instead of the table",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, to see whether it runs")
    parser.add_argument(
        "--tuning",
        type=Path,
        metavar="FOLDER",
        help="tune: where <kind of GPU>.json is written (default: the environment variable KVJAX_TUNING)",
    )
    options = parser.parse_args(argv)
    if options.tuning and options.name != "tune":
        parser.error(f"--tuning is for tune, not for {options.name}; to use what it found, set KVJAX_TUNING")
    if not has_nvidia_driver():
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # `compiled` uses the plugin without a driver
    import_jax()

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    run: Callable[..., Iterator] = import_module(f"benchmarks.{options.name}").run
    more = {"folder": options.tuning} if options.name == "tune" else {}
    found = []
    console = Console(stderr=True)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(options.name)
        for measurement in run(lambda text: bar.update(task, description=text), options.quick, **more):
            found.append(measurement)
    text = json.dumps([m.as_json() for m in found], indent=1) + "\n"
    if options.json == Path("-"):
        sys.stdout.write(text)
        return 0
    if found:
        _print(found)
    if options.json:
        options.json.write_text(text)
    return 0


def _print(found: list) -> None:
    import jax
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {platform.processor() or 'CPU'}")
    for column in ("name", "value", "unit", "config"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for m in found:
        value = f"{m.value:,.0f}" if m.value >= 1000 else f"{m.value:.3g}"
        table.add_row(m.name, value, m.unit, ", ".join(f"{k} {v}" for k, v in m.config.items()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
