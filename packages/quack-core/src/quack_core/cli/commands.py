"""The commands of ``quack`` but for ``doctor``; click reads the words, rich draws on terminals."""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from quack_core import env as variables
from quack_core.__about__ import __version__
from quack_core.cli import doctor as examination
from quack_core.cli import warmup as warming
from quack_core.errors import DeviceError, QuackError
from quack_core.jit import store, versions
from quack_core.jit.keys import Kernel
from quack_core.jit.models import MODELS

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
@click.version_option(__version__, prog_name="quack")
def quack() -> None:
    """The QuACK kernels: what is wrong with them here, and which are compiled."""


def run(words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    try:
        return int(quack.main(list(words), prog_name="quack", standalone_mode=False) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 1
    except (QuackError, OSError, ValueError, TypeError) as error:
        click.echo(f"quack: {error}", err=True)
        return 1


@quack.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def doctor(words: tuple[str, ...]) -> int:
    """Find what is wrong with this environment, and print what mends it."""
    return examination.main(words)


@quack.command()
@click.option("--model", "models", multiple=True, help=f"A model: {', '.join(MODELS)}.")
@click.option("--ops", help="Only these operators, joined by commas.")
@click.option("--shapes", type=click.Path(path_type=Path, exists=True), help="A file of calls.")
@click.option("--arch", help="Architecture, such as sm_90a; by default the GPU's.")
@click.option("--workers", type=click.IntRange(1), help="Kernels at a time; by default one a core.")
@as_json
def warmup(
    models: tuple[str, ...],
    ops: str | None,
    shapes: Path | None,
    arch: str | None,
    workers: int | None,
    as_json: bool,
) -> int:
    """Compile the kernels of a model, or of the calls in a file, into the cache; needs no GPU.

    A line of the file is a call, such as
    {"op": "rmsnorm", "x": "bf16[8192, 4096]", "weight": "bf16[4096]", "grad": true}
    """
    if not models and shapes is None:
        raise click.UsageError("say what to compile: --model or --shapes")
    known = set(warming.operator_names())
    wanted = known if ops is None else {name.strip() for name in ops.split(",")}
    if wanted - known:
        unknown = ", ".join(sorted(wanted - known))
        raise click.UsageError(f"--ops: {unknown} unknown; known: {', '.join(sorted(known))}")
    described = [warming.model(name) for name in models]
    calls = [] if shapes is None else warming.calls_of_file(shapes)
    try:
        target = warming.detect(arch)
    except DeviceError as error:
        raise click.UsageError(f"say --arch, such as --arch sm_90a: {error}") from error
    calls += [call for model in described for call in warming.calls_of_model(model, target)]
    calls = [call for call in calls if ops is None or call["op"] in wanted]
    if not calls:
        raise click.UsageError(
            "there are no calls" if ops is None else f"--ops: none of these calls is of {ops}"
        )
    kernels = warming.kernels_of(calls, target)
    with _progress(len(kernels), quiet=as_json) as advance:
        result = warming.fill(kernels, workers or len(os.sched_getaffinity(0)), advance)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=1))
    else:
        for name, reason in result.failed:
            click.echo(f"{name}: {reason}", err=True)
        click.echo(
            f"{len(kernels)} kernels in {result.folder} for {versions.flavour()}: "
            f"{result.compiled} compiled, {result.present} there before, "
            f"{len(result.failed)} failed, {result.seconds:.1f} s"
        )
    return int(bool(result.failed))


@quack.group()
def cache() -> None:
    """The compiled kernels on disk."""


@cache.command()
@as_json
def path(as_json: bool) -> None:
    """Print the folder."""
    place = str(store.make_folder())
    click.echo(json.dumps({"path": place}) if as_json else place)


@cache.command("list")
@as_json
def list_entries(as_json: bool) -> None:
    """List the kernels, the one that was used last in front."""
    rows = [_row(entry) for entry in store.entries(store.make_folder())]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table("key", "kernel", "target", "kB", "compiled in", "last used", box=None)
    for row in rows:
        seconds = "" if row["compile_seconds"] is None else f"{row['compile_seconds']:.2f} s"
        size = f"{row['size_bytes'] / 1024:.0f}"
        values = (row["kernel"], row["target"], size, seconds, row["used"])
        table.add_row(row["key"][:12], *(str(value) for value in values))
    Console(width=None if os.isatty(1) else 200).print(table)


@cache.command()
@as_json
def stats(as_json: bool) -> None:
    """Count the kernels."""
    place = store.make_folder()
    present = store.entries(place)
    found = {
        "path": str(place),
        "entries": len(present),
        "size_bytes": sum(entry.size_bytes for entry in present),
        "limit_bytes": variables.get("QUACK_CACHE_MAX_MB") << 20,
        "damaged": len(store.damaged(place)),
        "compile_seconds": round(
            sum((entry.record or {}).get("compile_seconds", 0.0) for entry in present), 3
        ),
    }
    _print_pairs(found, as_json)


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def clear(yes: bool, as_json: bool) -> None:
    """Remove all kernels; running processes keep those that they have loaded."""
    place = store.make_folder()
    if not yes and not as_json:
        click.confirm(f"Remove {len(store.entries(place))} kernels from {place}?", abort=True)
    entries, size = store.clear(place)
    _print_pairs({"path": str(place), "removed": entries, "size_bytes": size}, as_json)


@quack.command()
@as_json
def env(as_json: bool) -> None:
    """Print the environment variables with their values here, and the versions in use."""
    values = {each.name: os.environ.get(each.name) for each in variables.VARIABLES}
    found: dict[str, dict[str, str | None]] = {
        "versions": {
            "quack-core": __version__,
            "nvidia-cutlass-dsl": versions.dsl(),
            "flavour": versions.flavour(),
            "apache-tvm-ffi": versions.tvm_ffi(),
            "python": versions.python(),
            "host": versions.host(),
        },
        "variables": values,
    }
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for name, version in found["versions"].items():
        click.echo(f"{name:20} {version}")
    for each in variables.VARIABLES:
        default = each.shown or each.default
        click.echo(f"{each.name:20} {values[each.name] or f'not set ({default})'}")


def _row(entry: store.Entry) -> dict[str, Any]:
    record = entry.record or {}
    key = record.get("key", {})
    used = datetime.datetime.fromtimestamp(entry.used, datetime.UTC)
    return {
        "key": entry.digest,
        "kernel": record.get("symbol", "unknown"),
        "target": key.get("target", "unknown"),
        "module": key.get("module", "unknown"),
        "size_bytes": entry.size_bytes,
        "compile_seconds": record.get("compile_seconds"),
        "used": used.isoformat(timespec="seconds"),
    }


def _print_pairs(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            click.echo(f"{name.replace('_', ' '):16} {value}")


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    """Gives a function to call with each kernel that is ready: a bar on terminals, else nothing."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda kernel, error: None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, name="")

        def advance(kernel: Kernel, error: str | None) -> None:
            bar.update(task, advance=1, name=kernel.name)

        yield advance
