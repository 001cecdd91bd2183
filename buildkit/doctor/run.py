"""``doctor``: why would a push from here fail? Looks at everything on its way, and tells what it saw.

The story: this machine - the way to the registry - who answers - may we write - how does it take chunks - how large may
a body be - and would a plain ``docker push`` get this image through? Each step goes on only where the one before did,
and what was not looked at is said. Nothing here raises for what a network or a server does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from buildkit.doctor import chunks, host, judge, limit, way
from buildkit.doctor.bounded import Late, within
from buildkit.doctor.findings import Area, Finding, Level, of_error
from buildkit.doctor.report import DoctorReport, in_order
from buildkit.doctor.seen import CredentialSeen, EngineSeen, Exchange, ImageSeen, LimitSeen, WaySeen, WriteSeen
from buildkit.doctor.uploads import REQUEST_SECONDS, Budget, Session, Uploads
from buildkit.errors import BuildkitError, MissingComponentError, NotFoundError
from buildkit.image.cache import BlobCache, cache_limit, cache_root
from buildkit.image.compress import DEFAULT_CODEC
from buildkit.image.source import ImageSource
from buildkit.model import Reference
from buildkit.recipe import Recipe
from buildkit.registry import Clock, Credentials, FixedCredentials, RegistryClient, RegistryOptions, SystemClock
from buildkit.registry.answers import is_html
from buildkit.registry.auth import parse_challenges
from buildkit.registry.location import Origin
from buildkit.registry.secrets import forms, masked
from buildkit.registry.steps import Answer, Failure, Request, is_retryable
from buildkit.registry.upload import pull_scope, push_scope
from buildkit.units import format_size

DEFAULT_BUDGET = 400 * 10**6
QUICK_BUDGET = 10**6
"""Bytes of request bodies that a measurement, or a quick look, sends at most."""

IMAGE_SECONDS = 60.0

Say = Callable[[str], None]
OpenImage = Callable[[], ImageSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """``registry`` are the settings that pushes would have. ``quick`` sends no body above a megabyte and measures no
    limit; ``budget`` bounds all bodies together, in bytes. ``needs_engine``: without an engine nothing goes.
    ``machine`` off leaves this machine out, for whoever looks at several registries from it.
    """

    registry: RegistryOptions
    credentials: Credentials
    recipe: Recipe | None = None
    engine_host: str | None = None
    needs_engine: bool = True
    machine: bool = True
    quick: bool = False
    budget: int = DEFAULT_BUDGET

    @property
    def allowed(self) -> int:
        """Bytes that may be sent."""
        return min(self.budget, QUICK_BUDGET) if self.quick else self.budget


def plan(reference: Reference | None, options: DoctorOptions, *, registry: str | None = None) -> tuple[str, ...]:
    """What ``diagnose`` would send, in words. Looks at nothing."""
    target = reference.registry if reference is not None else registry
    if target is None:
        return ("nothing is sent: no registry is named",)
    lines = [f"to {target}: a connection, a TLS handshake, GET /v2/ without and with the credential"]
    if reference is None:
        return (*lines, "no upload: no repository is named")
    lines.append(
        f"to {reference.name}: one upload with a few chunks of a few kilobytes, broken off once, then cancelled"
    )
    if options.quick:
        return (*lines, f"no body above {format_size(QUICK_BUDGET)}, and no more than that in all")
    lines.append(
        f"then uploads of one chunk each, from {format_size(options.registry.effective_chunk)} and 100 MB on to where "
        f"the limit lies, each cancelled; no more than {format_size(options.allowed)} in all"
    )
    return tuple(lines)


def diagnose(
    reference: Reference | None,
    options: DoctorOptions,
    say: Say,
    *,
    registry: str | None = None,
    open_image: OpenImage | None = None,
    image_optional: bool = False,
    also: Sequence[Finding] = (),
    state: str | os.PathLike[str] | None = None,
    clock: Clock | None = None,
    environ: Mapping[str, str] = os.environ,
) -> DoctorReport:
    """Look at everything between here and ``reference`` (or the host ``registry``, where no repository is known).

    ``open_image`` opens the image that is to be pushed, which need not be built yet where it is ``image_optional``;
    ``also`` are findings that the caller has made already. ``say``
    gets a line about what happens now, and before anything large is sent how much it can be. Leaves no upload behind,
    also when it is interrupted. Raises UsageError for a CA bundle that cannot be read, and KeyboardInterrupt.
    """
    clock = clock or SystemClock()
    return _Doctor(
        reference, options, say, registry, open_image, image_optional, list(also), state, clock, environ
    ).run()


@dataclass(slots=True)
class _Doctor:
    reference: Reference | None
    options: DoctorOptions
    say: Say
    registry: str | None
    open_image: OpenImage | None
    image_optional: bool
    lines: list[Finding]
    state: str | os.PathLike[str] | None
    clock: Clock
    environ: Mapping[str, str]
    budget: Budget = field(init=False)
    uploads: Uploads | None = None
    kind: str = ""
    version: str | None = None
    limit: LimitSeen | None = None
    secrets: tuple[str, ...] = ()
    _open: bool = False
    _scheme: str = ""

    def run(self) -> DoctorReport:
        started = self.clock.monotonic()
        self.budget = Budget(total=self.options.allowed)
        target = self.reference.registry if self.reference is not None else self.registry
        if self.options.machine:
            self._host()
        image = self._image()
        if target is None:
            self._not_run(Area.REGISTRY, "no registry is named", "give a reference, or a recipe with a target")
        else:
            self._registry(target, image)
        subject = str(self.reference or target or (self.options.recipe and self.options.recipe.name) or "this machine")
        seen = self.uploads.seen() if self.uploads is not None else None
        if seen is not None:
            self.lines += judge.sessions(seen)
        return DoctorReport(
            subject=subject,
            lines=in_order([self._discreet(line) for line in self.lines]),
            kind=self.kind,
            version=self.version,
            limit=self.limit.known if self.limit is not None else None,
            limit_by=judge.limit_by(self.limit) if self.limit is not None else "",
            sent=self.budget.spent,
            budget=self.options.allowed,
            uploads=seen.opened if seen is not None else 0,
            cancelled=seen.cancelled if seen is not None else 0,
            seconds=self.clock.monotonic() - started,
        )

    def _discreet(self, line: Finding) -> Finding:
        """The last of several fences: whatever a line was made of, what we log in with is not in it."""
        return replace(
            line,
            seen=masked(line.seen, self.secrets),
            means=masked(line.means, self.secrets),
            remedy=masked(line.remedy, self.secrets),
        )

    def _not_run(self, area: Area, why: str, remedy: str = "") -> None:
        self.lines.append(Finding(area=area, level=Level.NOT_RUN, seen=f"not looked at: {why}", remedy=remedy))

    # This machine ----------------------------------------------------------------------------------------------------

    def _host(self) -> None:
        recipe = self.options.recipe
        self.say("looking at the engine and at what this machine has")
        builder = recipe.build.builder if recipe is not None else None
        engine: EngineSeen = host.engine(
            self.options.engine_host, recipe, needed=self.options.needs_engine and builder is None
        )
        self.lines += judge.engine(engine)
        self.lines += judge.tools(host.tools(recipe, self.environ))
        cache = cache_root(self.environ)
        if engine.disk is None or not _same_disk(cache, Path(engine.disk.place)):
            self.lines += judge.disk(host.local_disk(cache))

    def _image(self) -> ImageSeen | None:
        if self.open_image is None:
            return None
        self.say("looking at the image's layers")
        recipe = self.options.recipe
        codec = (recipe.push.codec if recipe is not None else None) or DEFAULT_CODEC
        try:
            with within(IMAGE_SECONDS, self.open_image) as source:
                cache = BlobCache(cache_root(self.environ), limit=cache_limit(self.environ))
                return host.image(source, cache, codec, self.options.engine_host)
        except Late:
            return ImageSeen(name="", error=BuildkitError(f"the image does not open within {IMAGE_SECONDS:.0f} s"))
        except BuildkitError as error:
            if self.image_optional and isinstance(error, NotFoundError | MissingComponentError):
                self._not_run(Area.DOCKER_PUSH, "there is no image yet")
                return None
            return ImageSeen(name="", error=error)

    # The registry ----------------------------------------------------------------------------------------------------

    def _registry(self, registry: str, image: ImageSeen | None) -> None:
        wished = self.options.registry
        origin = Origin.of_registry(registry, plain_http=wished.plain_http)
        self.say(f"looking at the way to {origin}")
        seen = way.look(origin, wished, self.clock)
        self.lines += judge.way(seen)
        found, credential = host.credential(registry, self.options.credentials, self.environ)
        if found is not None:
            values = (found.password, found.identity_token, found.registry_token, (found.basic() or "")[6:])
            self.secrets = forms(value for value in values if value)
        patience = replace(
            wished,
            connect_timeout=min(wished.connect_timeout, 5.0),
            silence_timeout=min(wished.silence_timeout, 30.0),
            answer_timeout=min(wished.answer_timeout, 120.0),
            retries=0,
        )
        client = RegistryClient(
            registry,
            credentials=FixedCredentials(registry, found),
            options=patience,
            clock=self.clock,
            state=self.state,
        )
        with client:
            if self._speaks(client, seen):
                self._with(client, replace(credential, open=self._open), registry)
            else:
                self._not_run(Area.CREDENTIALS, "no registry answers")
                self._not_run(Area.CHUNKS, "no registry answers")
                self._not_run(Area.LIMIT, "no registry answers")
            if image is not None:
                self.lines += judge.docker_push(image, wished, self.limit, client.learned_limit)

    def _speaks(self, client: RegistryClient, seen: WaySeen) -> bool:
        """Is a registry there?"""
        if not seen.passable or (seen.tls is not None and (seen.tls.verify or seen.tls.error)):
            return False
        request = self._greeting(client, authenticate=False)
        with client.within(REQUEST_SECONDS) as late:
            reply = _twice(client, request)
            if late():
                reply = Failure(kind="timeout", detail=f"no whole answer within {REQUEST_SECONDS:.0f} s")
            answer = reply if isinstance(reply, Answer) else None
            there = answer is not None and answer.status in (200, 401, 403) and not is_html(answer)
            if there and answer is not None:
                self.kind, self.version = client.identify(answer)
        self.lines += judge.greeting(Exchange(request=request, reply=reply), self.kind, self.version)
        if answer is not None:
            self._open = answer.status == 200
            challenges = parse_challenges(answer.headers.get("www-authenticate", ""))
            self._scheme = "token" if any(c.scheme == "bearer" for c in challenges) else "basic"
        return there

    def _greeting(self, client: RegistryClient, *, authenticate: bool) -> Request:
        scopes = (pull_scope(self.reference.repository),) if self.reference is not None and authenticate else ()
        return Request(
            doing=f"greeting the registry {client.registry}",
            method="GET",
            url=f"{client.origin}/v2/",
            scopes=scopes,
            authenticate=authenticate,
        )

    def _with(self, client: RegistryClient, credential: CredentialSeen, registry: str) -> None:
        credential = self._login(client, credential)
        self.lines += judge.credential(credential, registry)
        if self.reference is None:
            for area in (Area.CHUNKS, Area.LIMIT):
                self._not_run(area, "no repository is named", f"{registry}/OWNER/NAME")
            return
        refused = credential.error is not None or (credential.login is not None and credential.login.status != 200)
        if refused or (credential.source is None and not credential.open):
            for area in (Area.CHUNKS, Area.LIMIT):
                self._not_run(area, "it needs a credential that the registry takes")
            return
        with Uploads(client, self.reference.repository, self.budget, self.say) as self.uploads:
            self._write(client, self.uploads, self.reference.repository)

    def _login(self, client: RegistryClient, credential: CredentialSeen) -> CredentialSeen:
        """The greeting once more, with the credential."""
        if credential.source is None:
            return credential
        request = self._greeting(client, authenticate=True)
        try:
            with client.within(REQUEST_SECONDS):
                reply = _twice(client, request)
        except BuildkitError as error:
            return replace(credential, error=error)
        return replace(credential, login=Exchange(request=request, reply=reply), scheme=self._scheme)

    def _write(self, client: RegistryClient, uploads: Uploads, repository: str) -> None:
        self.say(f"opening an upload in {repository}, to be cancelled again")
        seen = WriteSeen(scope=push_scope(repository))
        session: Session | None = None
        try:
            opened = uploads.open()
            if isinstance(opened, Session):
                session, seen = opened, replace(seen, opened=opened.opened)
            else:
                seen = replace(seen, opened=opened)
        except BuildkitError as error:
            seen = replace(seen, error=error)
        if session is None and seen.opened is not None and seen.opened.status in (401, 403):
            seen = replace(seen, readable=self._may_read(client, repository))
        self.lines += judge.write(seen, self.kind)
        if session is None:
            for area in (Area.CHUNKS, Area.LIMIT):
                self._not_run(area, "no upload can be opened")
            return
        try:
            taken = chunks.probe(uploads, session)
        except BuildkitError as error:
            self.lines.append(of_error(Area.CHUNKS, error))
            self._not_run(Area.LIMIT, "chunks could not be tried")
            return
        finally:
            uploads.cancel(session)
        self.lines += judge.chunks(taken)
        self._limit(client, uploads, taken.stored, taken.largest)

    def _may_read(self, client: RegistryClient, repository: str) -> bool | None:
        request = Request(
            doing="trying to read",
            method="GET",
            url=f"{client.origin}/v2/{repository}/tags/list?n=1",
            scopes=(pull_scope(repository),),
        )
        try:
            with client.within(REQUEST_SECONDS):
                reply = client.ask(request)
        except BuildkitError:
            return None
        return reply.status in (200, 404) if isinstance(reply, Answer) else None

    def _limit(self, client: RegistryClient, uploads: Uploads, stored: bool, largest: int | None) -> None:
        wished, known = self.options.registry, client.learned_limit
        if known is not None:
            self.lines.append(judge.learned(known, wished))
        if self.options.quick:
            self._not_run(Area.LIMIT, "a quick look sends nothing large", "leave --quick out to measure it")
            return
        if not stored:
            self._not_run(Area.LIMIT, "no chunk is taken")
            return
        self.say(
            f"measuring the body limit: at most {format_size(uploads.budget.left)} are sent to "
            f"{client.registry}, in uploads that are cancelled"
        )
        self.limit = limit.measure(
            uploads,
            accepted=chunks.PIECE if largest is None else min(chunks.PIECE, largest),
            wanted=wished.effective_chunk,
            largest=largest,
            clock=self.clock,
            say=self.say,
        )
        self.lines += judge.limit(self.limit, wished)
        self.lines += self._remember(client, self.limit)

    def _remember(self, client: RegistryClient, seen: LimitSeen) -> Iterator[Finding]:
        """As a push would: a refusal for size, and a body that fits and is not much smaller. A failure of another kind,
        or an interval that the budget left wide, would only make later pushes slow."""
        accepted, refused = seen.known.accepted, seen.known.refused
        if not self.options.registry.learn or seen.broke or seen.stopped == "error":
            return
        known = client.learned_limit
        if refused is not None and (2 * accepted < refused or accepted < self.options.registry.smallest_chunk):
            return
        if refused is None and (known is None or accepted <= known.accepted):
            return
        client.learn_limit(accepted=accepted, refused=refused)
        now = client.learned_limit
        what = "no smaller limit than the settings" if now is None else format_size(now.accepted)
        if now != known:
            yield Finding(
                area=Area.LIMIT,
                level=Level.OK,
                seen=f"remembered for {client.registry}: {what}",
                means="the next push begins with chunks that fit",
            )


def _twice(client: RegistryClient, request: Request) -> Answer | Failure:
    """Once more after a failure that may pass: a diagnosis is about what lasts."""
    reply = client.ask(request)
    return client.ask(request) if is_retryable(reply) else reply


def _same_disk(one: Path, other: Path) -> bool:
    def device(path: Path) -> int:
        return next(folder for folder in (path, *path.parents) if folder.exists()).stat().st_dev

    try:
        return device(one) == device(other)
    except OSError:
        return False
