"""The `tilery` command. A verb's file is thin: it reads options, calls the workbench and prints."""

import sys

import typer

from tilery.cli import (
    bench,
    cache,
    check,
    compare,
    configs,
    doctor,
    infer,
    ladder,
    ops,
    plan,
    plot,
    report,
    runs,
    sanitize,
    show,
    surroundings,
    tune,
)

app = typer.Typer(
    cls=surroundings.Verbs,
    help="GPU kernels for language models: check, bench and show them, in every tile language.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("ops")(ops.ops)
app.command("plan")(plan.plan)
app.command("check")(check.check)
app.command("sanitize")(sanitize.sanitize)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("ladder")(ladder.ladder)
app.command("infer")(infer.infer)
app.command("compare")(compare.compare)
app.add_typer(runs.runs, name="runs")
app.command("report")(report.report)
app.command("plot")(plot.plot)
app.command("show")(show.show)
app.add_typer(configs.configs, name="configs")
app.command("cache")(cache.cache)


def main() -> None:
    from tilery.base.errors import TileryError

    with surroundings.prepared():
        try:
            app()
        except TileryError as error:
            print(f"tilery: {error}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
