"""What each stage of the pipeline does: a call into the package that does the work, and its result as an ``Outcome``.

``Stages`` holds what they share: the image as it was built, divided and pushed. The order of the stages, and what a
failure means for those behind it, is ``run.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from buildkit.build import BuildOptions, BuildResult, build, git, labels
from buildkit.check import run_check
from buildkit.check.recipe import policy_of
from buildkit.check.start import StartProof, prove_start
from buildkit.deploy.attached import default_policy
from buildkit.doctor import DoctorOptions, diagnose
from buildkit.engine import Engine
from buildkit.errors import BuildkitError, ImageError, MissingComponentError, NotFoundError, UsageError, one_line
from buildkit.evidence import (
    KINDS,
    attach_all,
    check_artifact,
    evidence_artifact,
    list_artifacts,
    make_sbom,
    newest,
    report_artifact,
    sbom_artifact,
)
from buildkit.gdn.compare import Verdict as Computed
from buildkit.image.cache import BlobCache
from buildkit.image.source import ImageSource
from buildkit.image.transports import Location
from buildkit.model import Digest, Reference
from buildkit.pipeline.evidence import check_json, evidence_of, later
from buildkit.pipeline.plan import Tags, divide_tags
from buildkit.pipeline.timeline import Recorder
from buildkit.promote import PromoteResult, promote
from buildkit.push import PushOptions, Target, push
from buildkit.recipe import Recipe
from buildkit.registry import CancelToken, Credentials, RegistryClient
from buildkit.report import Layer, Report, Stage, to_html
from buildkit.report.model import Verdict
from buildkit.smoke import SmokeOptions, run_smoke
from buildkit.smoke.recipe import subject_of
from buildkit.split.rewrite import SplitOptions, split_image
from buildkit.units import format_size
from buildkit.verify import pull_check

MARK = 12
"""Hexadecimal digits of a commit or an image id in a tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``reason`` is one line; ``data`` the JSON that the stage's own command prints. ``error`` is there where a failure
    has an exit code of its own."""

    verdict: Verdict
    reason: str
    data: Mapping[str, Any] | None = None
    error: BuildkitError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done.

    ``repository`` has neither tag nor digest; ``wanted`` is the tag that the target names, if it names one. ``source``
    is an image that is there already (a transport's text), with its ``tags``: for a run that does not build.
    """

    recipe: Recipe
    repository: Reference
    wanted: str | None = None
    source: str | None = None
    tags: tuple[str, ...] = ()
    build: BuildOptions = field(default_factory=BuildOptions)
    smoke: SmokeOptions = field(default_factory=SmokeOptions)
    push: PushOptions = field(default_factory=PushOptions)
    split: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the stages act on. ``connect`` opens the engine, which is at ``engine_host`` (None: where Docker's own rules
    say), ``open_source`` an image by a transport's text."""

    engine_host: str | None
    connect: Callable[[], Engine]
    client: RegistryClient
    credentials: Credentials
    open_source: Callable[[str], ImageSource]
    cache: BlobCache
    shown: Recorder
    cancel: CancelToken


class Stages:
    """One run's stages, and the image that passes through them. A context manager that frees what they hold open."""

    def __init__(self, job: Job, world: World, *, digest: Digest | None = None) -> None:
        """``digest``: of the image in the registry, where an earlier run has pushed it."""
        self.job = job
        self.world = world
        self.digest = digest
        self.tags: tuple[str, ...] = ()
        self.before: tuple[Layer, ...] = ()
        self.after: tuple[Layer, ...] | None = None
        self._named = job.source
        self._pinned: str | None = None
        self._identity: Digest | None = None
        self._labels: Mapping[str, str] | None = None
        self._built: BuildResult | None = None
        self._divided: ImageSource | None = None
        self._engine: Engine | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    # The stages ------------------------------------------------------------------------------------------------------

    def preflight(self) -> Outcome:
        """What would make the push fail hours later: the doctor's quick look, which sends next to nothing."""
        options = DoctorOptions(
            registry=self.world.client.options,
            credentials=self.world.credentials,
            recipe=self.job.recipe,
            engine_host=self.world.engine_host,
            quick=True,
        )
        report = diagnose(self.job.repository, options, self.world.shown.say)
        if report.ok:
            return Outcome(verdict="pass", reason=report.summary(), data=report.to_json())
        first = report.problems[0]
        error = BuildkitError(f"{first.area}: {first.seen}", hint=first.remedy or None)
        if report.only_missing:
            error.exit_code = MissingComponentError.exit_code
        return Outcome(verdict="fail", reason=str(error), data=report.to_json(), error=error)

    def build(self) -> Outcome:
        recipe, options = self.job.recipe, self.job.build
        engine = None if options.builder or recipe.build.builder else self.engine()
        built = build(recipe, engine, options, self.world.shown.say)
        self._built, self._named = built, built.source
        self._pinned = self._labels = None
        self._identity = built.image_id if built.output else None
        self._note_layers()
        names = ", ".join(built.names)
        return Outcome(verdict="pass", reason=f"{names} with {built.backend}", data=built.to_json())

    def check(self) -> Outcome:
        source = self.source()
        place = Location.parse(source)
        local = place.name if place.kind == "docker-daemon" else None
        prove = partial(self._prove_start, local) if local is not None else None
        with self._opened() as image:
            report = run_check(image, policy_of(self.job.recipe), prove=prove)
        report = replace(report, source=self._named or source)  # people know it by its name
        reason = report.summary()
        if report.violations:
            first = report.violations[0]
            reason += f": {first.path}: {first.message}" if first.path else f": {first.message}"
        return Outcome(verdict="pass" if report.ok else "fail", reason=one_line(reason), data=report.to_json())

    def smoke(self) -> Outcome:
        if not self.job.smoke.levels:
            return Outcome(verdict="skipped", reason=f"recipe {self.job.recipe.name} names no levels")
        name = self.local_image()
        report = run_smoke(
            subject_of(
                self.job.recipe, name, revision=self.job.build.source_revision or self.job.recipe.source.revision
            ),
            self.job.smoke,
            engine=self.engine(),
            open_image=self.world.open_source,
            say=self.world.shown.say,
        )
        verdict: Verdict = "fail"
        if report.verdict is Computed.PASS:
            verdict = "pass"
        elif report.verdict is Computed.NOT_RUN:
            verdict = "not-run"
        return Outcome(verdict=verdict, reason=report.summary(), data=report.to_json())

    def split(self) -> Outcome:
        if not self.job.split:
            return Outcome(verdict="skipped", reason="layers above the limit go in chunks")
        options = SplitOptions(
            limit=self.world.client.options.body_limit, codec=self.job.push.codec, threads=self.job.push.threads
        )
        whole = self._resources.enter_context(self._opened())
        done = self._resources.enter_context(split_image(whole, options))
        report = done.report
        self._divided = done.image
        self.before = tuple(
            Layer(
                label=f"layer {layer.number}/{report.layers_before}",
                size=layer.size or sum(part.size or part.predicted for part in layer.parts) or None,
                tar_size=layer.tar_size,
            )
            for layer in report.layers
        )
        self.after = layers_of(done.image)
        return Outcome(
            verdict="pass",
            reason=f"{report.layers_before} layers became {report.layers_after}",
            data=report.to_json(),
        )

    def push(self) -> Outcome:
        with ExitStack() as stack:
            source = self._divided or stack.enter_context(self._opened())
            tags = self.plan_tags(source.image_id)
            target = Target(repository=self.job.repository, tags=tags.fixed)
            stack.enter_context(self.world.shown.push())
            report = push(
                source,
                target,
                client=self.world.client,
                cache=self.world.cache,
                options=self.job.push,
                display=self.world.shown,
                cancel=self.world.cancel,
            )
        self.digest, self.tags = report.manifest.digest, tags.fixed
        try:
            self._note_layers()
        except BuildkitError as error:
            # The image is there, whatever becomes of a look at it: that is the stage verify's.
            self.world.shown.say(f"note: the sizes of the layers as pushed are not known: {error}")
        what = "is up to date" if report.up_to_date else f"{format_size(report.bytes_sent)} sent"
        return Outcome(verdict="pass", reason=f"{target}: {what}", data=report.to_json())

    def verify(self) -> Outcome:
        report = pull_check(self.image(), client=self.world.client, say=self.world.shown.say)
        bad = [blob.label for blob in report.blobs if not blob.ok]
        reason = f"{', '.join(bad)} not complete" if bad else f"{len(report.blobs)} blobs are complete"
        return Outcome(verdict="pass" if report.ok else "fail", reason=reason, data=report.to_json())

    def attach(self, report: Report) -> Outcome:
        """Attach what goes with the image: evidence, report, check and SBOM."""
        image = self.image()
        assert image.digest is not None
        # What is attached is complete, with this very stage: it is there once it has passed.
        told = report.with_stage(Stage(name="attach", verdict="pass", reason="attached", started=report.finished))
        evidence = evidence_of(told, image.digest, self.job.recipe.platform, known_bad=default_policy().known_bad)
        listed = list_artifacts(self.world.client, image)
        created = later(told.finished, [known.created for known in listed if known.kind in KINDS.values()])
        artifacts = [
            evidence_artifact(replace(evidence, created=created)),
            report_artifact(told.dump(), to_html(told).encode("utf-8", "backslashreplace"), created=created),
        ]
        check = check_json(report)
        if check is not None:
            artifacts.append(check_artifact(check, created=created))
        if newest(listed, "sbom") is None:
            self.world.shown.say("reading what is installed in the image")
            check_data = report.stage("check")
            with self._opened() as source:
                bill = make_sbom(source, image=image, check=check_data.data if check_data else None)
            artifacts.append(sbom_artifact(bill))
        descriptors = attach_all(self.world.client, image, artifacts)
        names = {kind: name for name, kind in KINDS.items()}
        attached = {
            names[artifact.kind]: str(descriptor.digest)
            for artifact, descriptor in zip(artifacts, descriptors, strict=True)
        }
        return Outcome(
            verdict="pass", reason=f"attached: {', '.join(attached)}", data={"image": str(image), "attached": attached}
        )

    def promote(self) -> Outcome:
        image = self.image()
        moving = self.plan_tags(image.digest).moving
        if not moving:
            return Outcome(verdict="skipped", reason=f"recipe {self.job.recipe.name} has no tag that moves")
        results: dict[str, PromoteResult] = {}
        for tag in moving:
            done = promote(self.world.client, image, tag, ancestry=self._ancestry, say=self.world.shown.say)
            results[tag] = done
            if done.moved:
                self.tags = (*self.tags, tag)  # at once: the next one may fail
        return Outcome(
            verdict="pass" if all(done.ok for done in results.values()) else "fail",
            reason="; ".join(_moved(image, tag, done) for tag, done in results.items()),
            data={"tags": {tag: done.to_json() for tag, done in results.items()}},
        )

    def _prove_start(self, name: str) -> StartProof:
        return prove_start(self.engine(), name, self.job.recipe.start)

    # What they share -------------------------------------------------------------------------------------------------

    def engine(self) -> Engine:
        """The engine, once it is needed. Raises MissingComponentError where none answers."""
        if self._engine is None:
            self._engine = self._resources.enter_context(self.world.connect())
        return self._engine

    def source(self) -> str:
        """The image as a transport's text: as it was built, else as it is in the registry.

        In the engine by its id: another build may give the name to another image between two stages.
        """
        if self._pinned is not None:
            return self._pinned
        if self._named is None:
            return f"docker://{self.image()}"
        place = Location.parse(self._named)
        self._pinned = self._named
        if place.kind == "docker-daemon" and place.name is not None:
            found = self.engine().inspect(str(self._built.image_id) if self._built else place.name)
            self._pinned, self._labels = f"docker-daemon:{found.id}", found.labels
        return self._pinned

    @contextmanager
    def _opened(self) -> Iterator[ImageSource]:
        """The image of ``source``; the same one each time. Raises ImageError where a file has become another."""
        text = self.source()
        with self.world.open_source(text) as source:
            if self._identity not in (None, source.image_id):
                raise ImageError(
                    f"{text} has become another image since this run began",
                    hint="run it again; two runs at once need a work tree each",
                )
            self._identity = source.image_id
            if self._labels is None and source.random_access:
                self._labels = source.config().labels
            yield source

    def image(self) -> Reference:
        """The image in the registry, by its digest."""
        if self.digest is None:
            raise UsageError(
                "no image has been pushed that this could be about", hint="add push to --stages, or --resume REF@DIGEST"
            )
        return self.job.repository.with_digest(self.digest)

    def local_image(self) -> str:
        """The image's name in the engine, which fetches it where it has been pushed from another machine."""
        if self._named is not None:
            place = Location.parse(self.source())
            if place.kind == "docker-daemon" and place.name is not None:
                return place.name
        image, engine = self.image(), self.engine()
        with self.world.open_source(f"docker://{image}") as remote:
            config = remote.image_id
        for name in (str(image), str(config)):
            try:
                engine.inspect(name)
            except NotFoundError:
                continue
            return name
        self.world.shown.say(f"the engine fetches {image}")
        found = self.world.credentials.lookup(image.registry)
        engine.pull(image, username=found.username if found else "", password=(found and found.password) or "")
        return str(image)

    def plan_tags(self, image_id: Digest | None) -> Tags:
        """The tags to push and those to move."""
        # The image's id where no commit has these files.
        revision = None if self._built is not None and self._built.dirty else self.revision
        mark = revision[:MARK] if revision else image_id.hex[:MARK] if image_id else "unknown"
        expanded = tuple(n.rpartition(":")[2] for n in self._built.names) if self._built else self.job.tags
        return divide_tags(self.job.recipe.tags, expanded, wanted=self.job.wanted, mark=mark)

    @property
    def revision(self) -> str | None:
        """The commit that the image was built from, as far as this run knows: not what the work tree has by now."""
        if self._built is not None:
            return self._built.revision
        if self._named is None and self.digest is None:
            return git.facts([self.job.recipe.folder]).revision
        return self._labels.get(labels.REVISION) if self._labels else None

    def _ancestry(self, old: str, new: str) -> bool | None:
        return git.is_ancestor(old, new, self.job.recipe.folder)

    def _note_layers(self) -> None:
        """The layers as far as they are known: before a push their tars, after it what lies in the registry."""
        pushed = self.world.open_source(f"docker://{self.image()}") if self.digest else self._opened()
        with pushed as source:
            found = layers_of(source)
        if self._divided is None:
            self.before = found
        else:
            self.after = found


def _moved(image: Reference, tag: str, done: PromoteResult) -> str:
    way_out = "" if done.ok else f" (`buildkit promote {image} --tag {tag} --force` moves it)"
    return f"{tag}: {done.reason}{way_out}"


def layers_of(source: ImageSource) -> tuple[Layer, ...]:
    """Each layer with its sizes, as far as the source knows them, and the step that made it."""
    made: list[str | None] = []
    if source.random_access:
        steps = [step for step in source.config().history if not step.get("empty_layer")]
        made = [step["created_by"] if isinstance(step.get("created_by"), str) else None for step in steps]
    if len(made) != len(source.layers):
        made = [None] * len(source.layers)
    return tuple(
        Layer(
            label=f"layer {number}/{len(made)}",
            digest=layer.blob.digest if layer.blob else None,
            size=layer.blob.size if layer.blob else None,
            tar_size=layer.tar_size,
            created_by=step,
        )
        for number, (layer, step) in enumerate(zip(source.layers, made, strict=True), 1)
    )
