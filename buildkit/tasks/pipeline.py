"""``pipeline``: everything in one go, from the recipe to the tag, with a report that a person looks at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from buildkit.build import BuildOptions, facts, plan
from buildkit.cli import ReportedFailure, command, emit_json
from buildkit.disk import write_atomic
from buildkit.engine import Engine
from buildkit.errors import BuildkitError, FormatError, NotFoundError, StorageError, UsageError, one_line
from buildkit.evidence import fetch_report
from buildkit.image.cache import BlobCache, cache_limit, cache_root
from buildkit.image.compress import DEFAULT_CODEC
from buildkit.image.transports import open_source
from buildkit.model import Reference
from buildkit.pipeline import STAGES, Job, PipelineResult, Recorder, World, divide_tags, parse_stages, run_pipeline
from buildkit.pipeline.stages import MARK
from buildkit.progress import display
from buildkit.push import PushOptions
from buildkit.recipe import Recipe, push_target
from buildkit.registry import CancelToken, Credentials, RegistryClient
from buildkit.report import Report, to_html, to_markdown
from buildkit.report.markdown import escape
from buildkit.smoke import SmokeOptions
from buildkit.tasks import actions, flags, resolve
from buildkit.tasks.images import parse_arguments, parse_backend, parse_timeout
from buildkit.units import format_duration

RESUMED = ("smoke", "verify", "attach", "promote")
"""What is left to do for an image that another run has pushed."""


class NotAllRun(ReportedFailure):
    """Something that is missing here kept a stage from running; the report says what."""

    exit_code = 3


@command(
    positional=["name"],
    help={
        "name": f"recipe (default: {resolve.DEFAULT_RECIPE})",
        "to": "HOST[:PORT]/REPOSITORY[:TAG]; the tag is the one that moves (default: the recipe's target and tags)",
        "stages": f"only these, by commas: {', '.join(STAGES)}",
        "resume": "HOST[:PORT]/REPOSITORY@DIGEST: go on from the report that is attached to this image",
        "report": "folder for report.json, report.html and summary.md (default: .buildkit/report/NAME)",
        "allow-missing-gpu": "go on where there is no GPU; the report still says that smoke was not run",
        "dry-run": "tell what would be run, and do nothing",
        "split": "divide layers above the limit first (recipe: push.split)",
        "builder": "hand the build to this buildx builder",
        "backend": "auto, buildx, docker or classic",
        "build-arg": "NAME=VALUE for the Dockerfile; may be given several times",
        "source-url": "build this source instead of the recipe's (a fork)",
        "source-revision": "build this revision of the source instead of the recipe's",
        "timeout": "end the build after this time, like 2h",
        "rebuild": "use no cache, and make the base anew",
        "ignore-disk": "build even where the disk looks too small",
        "limit": "largest request body that the way to the registry lets through, like 100MB",
        "edge": "preset of limits: cloudflare-free, business, enterprise or none",
        "parallel": f"uploads at once (default {flags.PARALLEL})",
        "retries": f"failures in a row that are forgiven (default {flags.RETRIES}); acknowledged bytes refill them",
        "threads": "threads that compress (default: all processors)",
        "engine": flags.ENGINE,
        **flags.REGISTRY,
    },
)
def pipeline(
    context: Any,
    name: str = "",
    to: str = "",
    stages: str = "",
    resume: str = "",
    report: str = "",
    allow_missing_gpu: bool = False,
    dry_run: bool = False,
    split: bool = False,
    builder: str = "",
    backend: str = "auto",
    build_arg: list[str] = [],  # noqa: B006  # invoke tells a list flag by its default
    source_url: str = "",
    source_revision: str = "",
    timeout: str = "",
    rebuild: bool = False,
    ignore_disk: bool = False,
    limit: str = "",
    edge: str = "",
    parallel: int = flags.PARALLEL,
    retries: int = flags.RETRIES,
    threads: int = 0,
    plain_http: bool = False,
    insecure: str = "",
    ca_bundle: str = "",
    username: str = "",
    password_stdin: bool = False,
    engine: str = "",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Build, check, smoke-test and push an image, attach the evidence, move the tag, and write a report."""
    with _in_summary(name or resolve.DEFAULT_RECIPE):
        recipe = resolve.recipe_named(name)
        known = _resumed(resume)
        wanted = parse_stages(stages) if stages or not known else RESUMED
        if known and (wrong := set(wanted) & {"preflight", "build", "split", "push"}):
            raise UsageError(
                f"--resume goes on from an image that is pushed: {', '.join(sorted(wrong))} comes before that",
                hint=f"--stages {','.join(RESUMED)}",
            )
        where = _target(recipe, to, known)
        building = BuildOptions(
            backend=parse_backend(backend),
            builder=builder or None,
            arguments=parse_arguments(build_arg),
            source_url=source_url or None,
            source_revision=source_revision or None,
            timeout=parse_timeout(timeout),
            rebuild=rebuild,
            ignore_disk=ignore_disk,
        )
        if dry_run or bool(context.config.run.dry):
            _tell(recipe, where, wanted, building, known, json=json)
            return
        host = flags.engine_host(engine)
        options = flags.registry_options(
            recipe,
            limit=limit,
            edge=edge,
            parallel=parallel,
            retries=retries,
            plain_http=plain_http,
            insecure=insecure,
            ca_bundle=ca_bundle,
        )
        who = flags.credentials(where.registry, username=username, password_stdin=password_stdin)
        job = Job(
            recipe=recipe,
            repository=replace(where, tag=None, digest=None),
            wanted=where.tag,
            build=building,
            smoke=SmokeOptions(
                levels=recipe.smoke.levels, dtype=recipe.smoke.dtype, allow_missing_gpu=allow_missing_gpu
            ),
            push=PushOptions(codec=recipe.push.codec or DEFAULT_CODEC, threads=flags.threads(threads)),
            split=split or recipe.push.split,
        )
        _keep_out(building, who, where.registry)
        if known is None and "build" not in wanted and set(wanted) - {"preflight"}:
            chosen = resolve.choose(recipe.name, engine_host=host)
            job = replace(job, source=chosen.source, tags=chosen.tags)
        cache = _cache()
        folder = Path(report or Path(".buildkit") / "report" / recipe.name)
        saved = _Saved(folder)
    cancel = CancelToken()
    with ExitStack() as stack:
        shown = Recorder(stack.enter_context(display(quiet=quiet)), secrets=_secrets(who, where.registry))
        client = stack.enter_context(
            RegistryClient(where.registry, credentials=who, options=options, observer=shown, cancel=cancel)
        )
        world = World(
            engine_host=host,
            connect=lambda: Engine.connect(host),
            client=client,
            credentials=who,
            open_source=lambda text: open_source(
                text,
                engine_host=host,
                registry_client_factory=lambda at: RegistryClient(at, credentials=who, options=options, cancel=cancel),
            ),
            cache=cache,
            shown=shown,
            cancel=cancel,
        )
        with _in_summary(recipe.name):
            earlier = _earlier(client, recipe, known) if known else None
        if earlier is not None:
            job = replace(job, tags=_tags_then(recipe, building, earlier))
        try:
            result = run_pipeline(
                job,
                world,
                stages=wanted,
                earlier=earlier,
                digest=known.digest if known else None,
                allow_missing_gpu=allow_missing_gpu,
                url=_run_url(os.environ),
                host=os.environ.get("RUNNER_NAME") or None,
                save=saved.save,
            )
        finally:
            problem = saved.finish()
            if problem is not None:
                shown.say(f"note: {problem}")
    _conclude(result, folder, problem, json=json, quiet=quiet)


def _conclude(result: PipelineResult, folder: Path, unwritten: StorageError | None, *, json: bool, quiet: bool) -> None:
    """Print the result; a failure is raised as the exit code that it stands for. ``unwritten`` is what could not be
    written down of it: a failure too, but a smaller one."""
    report = result.report
    outputs: dict[str, str] = {"verdict": report.verdict}
    if report.digest is not None:
        outputs |= {"digest": str(report.digest), "image": report.pull or ""}
    try:
        actions.write_outputs(outputs)
    except StorageError as error:
        unwritten = unwritten or error
    if json:
        emit_json({"ok": result.exit_code == 0 and unwritten is None, **report.to_json()})
    elif quiet:
        print(report.digest or report.verdict)
    else:
        print(f"{report.name}: {report.verdict}: {report.reason} ({format_duration(report.seconds)})")
        if report.pull:
            print(f"pull:   {report.pull}")
        print(f"report: {folder / 'report.html'}")
    also = f"; also, {unwritten.message}" if unwritten is not None else ""
    message, hint = report.reason, "--allow-missing-gpu lets this pass, untested" if result.blocked else None
    failed = report.failed
    if failed is not None and result.error is not None and failed.reason == str(result.error):
        # The way out stands last, and must not be what is cut from a long line.
        message, hint = f"{failed.name} failed: {result.error.message}", result.error.hint
    if result.exit_code:
        failure = (NotAllRun if result.exit_code == 3 else ReportedFailure)(message + also, hint=hint)
        failure.exit_code = result.exit_code
        raise failure
    if unwritten is not None:
        raise ReportedFailure(f"all is done, but {unwritten.message}", hint=unwritten.hint)


@contextlib.contextmanager
def _in_summary(name: str) -> Iterator[None]:
    """What ends a run before there is a report of it is on the job's page all the same."""
    try:
        yield
    except BuildkitError as error:
        # A page that cannot be written hides nothing: the error itself goes on.
        with contextlib.suppress(StorageError):
            actions.append_summary(f"## {escape(one_line(name, 100))}: fail\n\n{escape(str(error))}")
        raise


def _keep_out(building: BuildOptions, who: Credentials, registry: str) -> None:
    """Build arguments stay readable in the image: the registry's token must not be one."""
    if not building.arguments:
        return
    known = who.lookup(registry)
    secret = known.password if known is not None else None
    for name, value in building.arguments.items():
        if secret and secret in value:
            raise UsageError(
                f"--build-arg {name} holds the registry's password, and whoever has the image could read it",
                hint="name it under secrets in the recipe, and use RUN --mount=type=secret",
            )


def _secrets(who: Credentials, registry: str) -> tuple[str, ...]:
    try:
        known = who.lookup(registry)
    except BuildkitError:
        return ()  # the preflight, or the first request, says what is wrong with them
    found = (known.password, known.identity_token, known.registry_token) if known is not None else ()
    return tuple(text for text in found if text)


def _cache() -> BlobCache:
    try:
        return BlobCache(cache_root(), limit=cache_limit())
    except StorageError as error:
        raise StorageError(error.message, hint=error.hint or "BUILDKIT_CACHE_DIR names another folder") from error


def _resumed(text: str) -> Reference | None:
    if not text:
        return None
    known = Reference.parse(text, default_tag=None)
    if known.digest is None:
        raise UsageError(f"--resume {text} has no digest", hint="HOST[:PORT]/REPOSITORY@sha256:…, as push prints it")
    return known


def _target(recipe: Recipe, to: str, known: Reference | None) -> Reference:
    """Repository, and the tag where one was named."""
    if to:
        where = Reference.parse(to, default_tag=None)
        if where.digest is not None:
            raise UsageError(f"--to {to} is a digest: nothing can be pushed to it", hint="--resume goes on from one")
    else:
        where = replace(known, tag=None, digest=None) if known else push_target(recipe, os.environ)
    if known is not None and known.name != where.name:
        raise UsageError(f"--resume {known.name} is another repository than {where.name}", hint="leave --to out")
    return where


def _earlier(client: RegistryClient, recipe: Recipe, image: Reference) -> Report | None:
    if client.head_manifest(image) is None:
        raise NotFoundError(f"{image} is not in the registry", hint="was it pushed there, by the job before?")
    raw = fetch_report(client, image)
    if raw is None:
        return None
    where = f"the newest report attached to {image}"
    way_out = "run the pipeline again without --resume, which attaches one of its own, or delete that artifact"
    try:
        report = Report.parse(raw, where=where)
    except FormatError as error:
        raise FormatError(error.message, hint=error.hint or way_out) from error
    if report.digest != image.digest:
        raise FormatError("is about another image", where=where, hint=way_out)
    if report.name != recipe.name:
        # Another recipe's demands were checked, not this one's.
        raise UsageError(f"{where} is about the recipe {report.name}, not {recipe.name}")
    return report


def _tags_then(recipe: Recipe, building: BuildOptions, earlier: Report) -> tuple[str, ...]:
    """The recipe's tags for the image to go on with; only the work tree that it comes from can tell."""
    own = facts([recipe.folder, recipe.context_path])
    if own.revision is None or own.revision != earlier.revision:
        return ()
    return tuple(name.rpartition(":")[2] for name in plan(recipe, own, None, building).names)


def _tell(
    recipe: Recipe,
    where: Reference,
    stages: tuple[str, ...],
    building: BuildOptions,
    known: Reference | None,
    *,
    json: bool,
) -> None:
    """What a run would do."""
    own = facts([recipe.folder, recipe.context_path])
    names = plan(recipe, own, None, building).names
    tags = divide_tags(
        recipe.tags,
        [name.rpartition(":")[2] for name in names],
        wanted=where.tag,
        mark=(own.revision or "IMAGE")[:MARK],
    )
    if json:
        emit_json(
            {
                "ok": True,
                "name": recipe.name,
                "stages": list(stages),
                "repository": where.name,
                "fixed": list(tags.fixed) if "push" in stages else [],
                "moving": list(tags.moving) if "promote" in stages else [],
                "resume": str(known) if known else None,
            }
        )
        return
    print(f"{recipe.name}: {', '.join(stages)}" + (f", going on from {known}" if known else ""))
    if "push" in stages:
        print(f"would push {where.name} as {', '.join(tags.fixed)}")
    moving = tags.moving if "promote" in stages else ()
    print(f"would then move {', '.join(moving)}" if moving else "no tag would move")


def _run_url(environ: Mapping[str, str]) -> str | None:
    """The page of the CI run: GitHub and Gitea name theirs alike."""
    server, repository, run = (
        environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    )
    return one_line(f"{server.rstrip('/')}/{repository}/actions/runs/{run}") if server and repository and run else None


class _Saved:
    """The report on disk: as JSON after every stage, for a runner that is stopped; as pages at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._report: Report | None = None
        self._problem: StorageError | None = None
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("report.json", "report.html", "summary.md"):
                # Of an earlier run: should this one be killed, nobody shall take that for its report.
                (folder / name).unlink(missing_ok=True)

    def save(self, report: Report) -> None:
        self._report = report
        self._try(lambda: self._write("report.json", report.dump()))

    def finish(self) -> StorageError | None:
        """Write the pages. What could not be written (the disk that the build has filled) is no reason to stop before
        the other pages are tried; it is returned."""
        if self._report is None:
            return None
        report = self._report
        markdown = to_markdown(report)
        self._try(lambda: actions.append_summary(markdown))
        self._try(lambda: self._write("summary.md", markdown.encode("utf-8", "backslashreplace")))
        self._try(lambda: self._write("report.html", to_html(report).encode("utf-8", "backslashreplace")))
        return self._problem

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except StorageError as error:
            self._problem = error

    def _write(self, name: str, data: bytes) -> None:
        """In one step: who reads a report never sees half of one."""
        path = self._folder / name
        with _told(path):
            write_atomic(path, data, mode=0o644, durable=False)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}", hint="--report FOLDER") from error
