"""`keyhole serve`: any target behind the Open Inference Protocol v2."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.options import DONE, TARGET, Json, Quiet, complain
from keyhole.cli.output import print_json, print_lines
from keyhole.cli.watch_page import RUNS, open_page
from keyhole.errors import UsageError
from keyhole.live.form import ServedTarget
from keyhole.live.manager import Runs
from keyhole.live.server import LiveServer
from keyhole.oracles import Noisy, Rounded
from keyhole.oracles.http.access import LOOPBACK
from keyhole.serve.served_oracle import Limits, ServedOracle
from keyhole.serve.server import Server
from keyhole.targets import Target, open_target

ServedTargetName = Annotated[
    str | None, typer.Argument(metavar="TARGET", help=f"{TARGET.rstrip('.')}; may be left out with --ui.")
]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port to listen at; 0 takes any that is free. 8000, with --ui 0."),
]
MaxQueries = Annotated[int | None, typer.Option("--max-queries", "--budget", min=1, help="Most sequences in all.")]
RequestSeconds = Annotated[
    float, typer.Option(help="Most seconds until a request has arrived, and until it is answered.")
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A name of this machine by which clients may come; repeatable."),
]
TokenVariable = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with a token that clients must send.")
]

Boxes = Annotated[
    list[str] | None,
    typer.Option(metavar="TARGET", help="A box that the page may recover besides demos, repeatable."),
]


def serve(
    target: ServedTargetName = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Port = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; made of the target if left out.")] = None,
    decimals: Annotated[int | None, typer.Option(help="Round answers to so many decimals.")] = None,
    add_noise: Annotated[float | None, typer.Option(help="Add normal errors of this standard deviation.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Determines the noise.")] = 0,
    rate_limit: Annotated[float | None, typer.Option(help="Most queries (sequences) per second.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Most sequences per request.")] = Limits.batch,
    max_length: Annotated[int, typer.Option(min=1, help="Most tokens per sequence.")] = Limits.length,
    max_queries: MaxQueries = None,
    max_body: Annotated[int, typer.Option(min=1, help="Most bytes per request.")] = Limits.body,
    max_seconds: RequestSeconds = Limits.seconds,
    allow_host: AllowedHosts = None,
    token_env: TokenVariable = None,
    ui: Annotated[bool, typer.Option("--ui", help="A page that starts, shows, stops and compares recoveries.")] = False,
    box: Boxes = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs of that page, and to find earlier ones.")] = RUNS,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Serve a box over the Open Inference Protocol v2, to rehearse an audit on your own machine; or a page to watch.

    Example: `keyhole serve file:params.safetensors --decimals 4 --rate-limit 1000`, `keyhole serve --ui`
    """
    if box and not ui:
        raise UsageError("--box is for the page: keyhole serve --ui --box TARGET")
    offered = [_offer(text) for text in box or ()]
    if target is None:
        if not ui:
            raise UsageError("name the box to serve, or ask for the page alone: keyhole serve --ui")
        return _serve_page(LiveServer(Runs(runs, offered), host, port or 0), as_json=as_json, quiet=quiet)
    token = _token(token_env)
    limits = Limits(max_batch, max_length, rate_limit, max_body, max_queries, max_seconds)
    with redirect_stdout(sys.stderr):  # what the code of an oracle prints is no part of the report
        found = open_target(target)
        try:
            oracle = found.oracle if add_noise is None else Noisy(found.oracle, add_noise, seed=seed)
            oracle = oracle if decimals is None else Rounded(oracle, decimals)
            served = ServedOracle(oracle, name or model_name(found.text), limits)
            server: Server | LiveServer
            if ui:
                page = Runs(runs, [ServedTarget(found.text, found.label), *offered])
                server = LiveServer(page, host, port or 0, served, token, allow_host or ())
            else:
                server = Server(served, host, 8000 if port is None else port, token, allow_host or ())
        except BaseException:
            found.oracle.close()
            raise
    _announce(server, served, found, as_json=as_json, quiet=quiet, token_env=token_env)
    try:
        with redirect_stdout(sys.stderr):
            server.run()
    finally:
        found.oracle.close()
    if not (as_json or quiet):
        counts = f"{served.queries:,} queries answered in {served.requests:,} requests, {served.refused:,} refused"
        print_lines([("stopped", counts)], wrap=False)
    return DONE


def _offer(text: str) -> ServedTarget:
    """A box that the page may open: opened once, so that one that cannot be is said now."""
    with redirect_stdout(sys.stderr):
        found = open_target(text)
        found.oracle.close()
    return ServedTarget(found.text, found.label)


def _serve_page(server: LiveServer, *, as_json: bool, quiet: bool) -> int:
    """The page alone."""
    _warn_of_others(server)
    if as_json:
        print_json({"page": server.address, "runs": server.runs.folder})
    elif not quiet:
        print_lines({"page": server.address, "runs": str(server.runs.folder), "stop": "Ctrl-C"}.items(), wrap=False)
        sys.stdout.flush()
        open_page(server.address)
    sys.stdout.flush()
    with redirect_stdout(sys.stderr):
        server.run()
    if not (as_json or quiet):
        stopped = [run for run in server.runs.all() if run.state in ("stopped", "stopping")]
        again = shlex.join(["keyhole", "serve", "--ui", "--runs", str(server.runs.folder)])
        kept = f"; {len(stopped)} unfinished, to be resumed on the page: {again}" if stopped else ""
        typer.echo(f"    stopped  {len(server.runs.all())} runs in {server.runs.folder}{kept}")
    return DONE


def _warn_of_others(server: LiveServer) -> None:
    if server.host not in LOOPBACK:
        complain(f"whoever can reach {server.host} can start and stop runs on this page")


def model_name(text: str) -> str:
    """A name for the model that a target's text names: `demo:single-head?width=8` is `single-head`."""
    kind, _, rest = text.partition(":")
    last = re.split(r"[?#]", rest, maxsplit=1)[0].rstrip("/").rpartition("/")[2]
    stem = last.removesuffix(".safetensors").replace(".py:", "-")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or kind


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    token = os.environ.get(name)
    if not token:
        raise UsageError(f"the environment variable {name!r} is not set: put the token there, or leave out --token-env")
    return token


def _announce(
    server: Server | LiveServer,
    served: ServedOracle,
    target: Target,
    *,
    as_json: bool,
    quiet: bool,
    token_env: str | None,
) -> None:
    limits, url = served.limits, f"{server.address}/v2/models/{served.name}"
    page = server.address if isinstance(server, LiveServer) else None
    if isinstance(server, LiveServer):
        _warn_of_others(server)
    if server.host not in LOOPBACK:
        who = "whoever can reach this machine" if token_env is None else f"whoever knows the token in {token_env}"
        remedy = "; --token-env NAME wants a token" if token_env is None else ", which travels unencrypted"
        complain(f"listening at {server.host}, beyond this machine: {who} can ask this box{remedy}")
    if as_json:
        about = {
            "url": url,
            **({} if page is None else {"page": page}),
            "model": served.metadata(),
            "box": target.label,
            "max_batch": limits.batch,
            "max_length": limits.length,
            "rate_limit": limits.rate,
            "max_queries": limits.total,
            "max_body": limits.body,
            "max_seconds": limits.seconds,
        }
        print_json(about)
    elif not quiet:
        options = f"#token_env={token_env}" if token_env else ""
        rate = "" if limits.rate is None else f", {limits.rate:g} queries per second"
        rate += "" if limits.total is None else f", {limits.total:,} in all"
        lines = {
            "box": target.label,
            **({} if page is None else {"page": page}),
            "model": url,
            "tokens": f"{served.tokens.datatype} (batch, length, {served.tokens.shape[2]})",
            "answers": f"{served.answers.datatype} {list(served.answers.shape)}",
            "limits": f"{limits.batch:,} sequences per request, {limits.length:,} tokens per sequence{rate}",
            "ask": f"keyhole recover {shlex.quote(url + options)}",
            "stop": "Ctrl-C",
        }
        print_lines(lines.items(), wrap=False)
    sys.stdout.flush()
    if page is not None and not (as_json or quiet):
        open_page(page)
