"""``check``: will this image run on the card it is for, and start without the network?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from buildkit.check import run_check, same_fatbins
from buildkit.check.recipe import policy_of
from buildkit.check.start import StartProof, prove_start
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.cuda.arch import Arch
from buildkit.cuda.policy import Policy, VersionRange
from buildkit.engine import Engine
from buildkit.errors import UsageError
from buildkit.image.source import ImageSource
from buildkit.image.transports import Location, open_source
from buildkit.model import Platform
from buildkit.progress import display
from buildkit.recipe import Recipe, Start
from buildkit.tasks import actions, flags, resolve


@command(
    positional=["image"],
    help={
        "image": f"{flags.SOURCE}; or a folder, a wheel, a file (default: the recipe {resolve.DEFAULT_RECIPE})",
        "require": "architecture that must run, like sm_70; may be given several times (default: the recipe's)",
        "runtime": "range for the CUDA versions in the image, like '<13' (default: the recipe's)",
        "no-jit": "do not accept code that runs only after the driver has compiled PTX",
        "kernels": "list the kernels whose name matches this glob; may be given several times",
        "same": "instead: prove that this library's fatbins are, byte for byte, in a file of --in",
        "in": "with --same: where to look (default: the image)",
        "run": "also start the image in the engine, read-only and without a network, by the recipe's probe",
        "policy": "take requirements and start probe from this recipe, for an image that is not a recipe's",
        "source": "how to read the engine's image: auto, direct (its data root) or save",
        "platform": flags.PLATFORM,
        "engine": flags.ENGINE,
    },
)
def check(
    context: Any,
    image: str = "",
    require: list[str] = [],  # noqa: B006  # invoke tells a list flag by its default
    runtime: str = "",
    no_jit: bool = False,
    kernels: list[str] = [],  # noqa: B006
    same: str = "",
    in_: str = "",
    run: bool = False,
    policy: str = "",
    source: str = "auto",
    platform: str = "",
    engine: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Check from its bytes that an image (or a folder, wheel, file) runs on a GPU and starts without a network."""
    host = flags.engine_host(engine)
    if in_ and not same:
        raise UsageError("--in goes with --same LIBRARY")
    if same and (run or kernels or require or runtime or policy):
        raise UsageError("--same compares fatbins and nothing else: --require and the like do not go with it")
    given = in_ or image
    recipe: Recipe | None = None
    what: str | Path = Path(given)
    if not given or not os.path.exists(given) or ":" in given:
        chosen = resolve.choose(given, engine_host=host)
        what, recipe = chosen.source, chosen.recipe
    if policy:
        recipe = resolve.recipe_named(policy)

    def open_image(text: str) -> ImageSource:
        opened = open_source(
            text,
            engine_host=host,
            method=source,
            platform=Platform.parse(platform) if platform else None,
            registry_client_factory=flags.registry_reader(),
        )
        return flags.opened_for(opened, platform)

    with display(quiet=quiet) as shown:
        shown.say(f"reading {what}")
        if same:
            proof = same_fatbins(same, what, open_image=open_image)
            if json:
                emit_json(proof.to_json())
            else:
                print(proof.summary())
            if not proof.ok:
                raise ReportedFailure(proof.summary())
            return
        report = run_check(
            what,
            _policy(recipe, require=require, runtime=runtime, no_jit=no_jit),
            kernels=kernels,
            open_image=open_image,
            prove=(lambda: _prove(what, recipe, host)) if run else None,
        )
    actions.append_summary(report.to_markdown())
    if json:
        emit_json(report.to_json())
    elif quiet:
        print(report.summary())
    else:
        report.render(Console(soft_wrap=True))
        shown.say(f"{report.paths} paths in {report.seconds:.1f} s")
    if not report.ok:
        raise ReportedFailure(report.summary())


def _policy(recipe: Recipe | None, *, require: list[str], runtime: str, no_jit: bool) -> Policy:
    """The flags over the recipe's. Raises UsageError."""
    asked = policy_of(recipe) if recipe is not None else Policy()
    names = [name.strip() for text in require for name in text.split(",")]
    if not all(names):
        raise UsageError("--require without an architecture", hint="--require sm_70")
    if names:
        asked = replace(asked, require=tuple(Arch.parse(name) for name in names))
    if runtime:
        asked = replace(asked, runtime=VersionRange.parse(runtime))
    return replace(asked, allow_jit=asked.allow_jit and not no_jit)


def _prove(what: str | Path, recipe: Recipe | None, host: str | None) -> StartProof:
    """Start the image as its recipe says (or as it is configured)."""
    place = Location.parse(str(what))
    if place.kind != "docker-daemon" or place.name is None:
        raise UsageError(f"--run starts images of the engine, {what} is none", hint="docker load it first")
    spec = recipe.start if recipe is not None else Start()
    with Engine.connect(host) as engine:
        return prove_start(engine, place.name, spec)
