"""The `hopperflash` command."""

from __future__ import annotations

import typer

from hopperflash.cli import cache, profile
from hopperflash.cli.bench import bench
from hopperflash.cli.compile import compile_kernels
from hopperflash.cli.demo import demo
from hopperflash.cli.doctor import doctor
from hopperflash.cli.emulate import emulate
from hopperflash.cli.explain import explain
from hopperflash.cli.io import io

app = typer.Typer(
    help="Exact attention for NVIDIA Hopper, executable on any CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(bench)
app.command("compile")(compile_kernels)
app.command()(demo)
app.command()(doctor)
app.command()(emulate)
app.command()(explain)
app.command()(io)
app.add_typer(cache.app, name="cache")
app.add_typer(profile.app, name="profile")
