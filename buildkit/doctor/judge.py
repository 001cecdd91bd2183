"""From what was observed to what is said about it: each function takes one observation and gives its lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from buildkit.doctor.findings import Area, Finding, Level, of_error
from buildkit.doctor.seen import (
    ChunksSeen,
    CredentialSeen,
    DiskSeen,
    EngineSeen,
    Exchange,
    ImageSeen,
    LayerSeen,
    LimitSeen,
    LocationSeen,
    SessionsSeen,
    TlsSeen,
    ToolsSeen,
    WaySeen,
    WriteSeen,
)
from buildkit.errors import AuthError, one_line
from buildkit.registry.answers import describe, error_for, is_html, shown, summary, who
from buildkit.registry.limits import LearnedLimit
from buildkit.registry.options import RegistryOptions
from buildkit.registry.quirks import Quirk
from buildkit.registry.steps import Answer
from buildkit.units import format_duration, format_size

SKEW_WARNING, SKEW_PROBLEM = 60.0, 900.0
"""Seconds. Tokens are good for minutes, and signatures of object stores for a quarter of an hour."""
LITTLE_DISK = 10 * 10**9
EXPIRES_SOON = 14 * 86400.0
COMPRESSION = (0.25, 0.85)
"""What is left of a CUDA layer after gzip, at best and at worst."""


_QUIRKS = {
    Quirk.EQUAL_PARTS: "wants all parts of equal size",
    Quirk.NO_STATUS: "cannot be asked how much it has",
    Quirk.STATUS_ONE_HIGH: "counts one byte too many when asked",
    Quirk.PATCH_ONE_HIGH: "counts one byte too many after a chunk",
    Quirk.NO_RANGE: "does not acknowledge a chunk's bytes",
    Quirk.POISONED_SESSION: "takes nothing more after a chunk that broke off",
    Quirk.LOCATION_REWRITTEN: "names a wrong scheme or port for itself",
    Quirk.NO_LOCATION: "does not say where an upload goes on",
}


def _line(area: Area, level: Level, seen: str, means: str = "", remedy: str = "", *, missing: bool = False) -> Finding:
    return Finding(area=area, level=level, seen=seen, means=means, remedy=remedy, missing=missing)


# This machine --------------------------------------------------------------------------------------------------------


def engine(seen: EngineSeen) -> Iterator[Finding]:
    area = Area.ENGINE
    if seen.error is not None:
        if seen.needed:
            yield of_error(area, seen.error, means="nothing can be built, and no image of the engine's can be pushed")
        else:
            yield of_error(area, seen.error, level=Level.NOTE, means="archives and layouts can be pushed all the same")
        return
    yield _line(area, Level.OK, f"engine {seen.version} answers at {seen.host}, images in {seen.storage}")
    if seen.gpu:
        yield _line(area, Level.OK, f"containers can have GPUs: {', '.join(seen.gpu[:4])}")
    elif seen.wants_gpu:
        yield _line(
            area,
            Level.NOTE,
            "the engine names no NVIDIA runtime and no GPU",
            "a smoke test here will most likely not run; building and pushing need no GPU",
            "for a smoke test: install nvidia-container-toolkit and run `nvidia-ctk runtime configure`",
        )
    if seen.disk is not None:
        yield from disk(seen.disk)


def disk(seen: DiskSeen) -> Iterator[Finding]:
    area = Area.DISK
    if seen.free is None:
        needed = f", {format_size(seen.needed)} are needed" if seen.needed else ""
        yield _line(area, Level.NOT_RUN, f"{seen.place} is on another machine{needed}", "its free space is not known")
        return
    text = f"{format_size(seen.free)} free at {seen.place}"
    prune = "`docker system prune` frees space"
    if seen.needed is not None and seen.free < seen.needed:
        yield _line(
            area, Level.PROBLEM, text, f"{seen.for_what} needs {format_size(seen.needed)}", f"{prune}; or a larger disk"
        )
    elif seen.free < LITTLE_DISK:
        yield _line(area, Level.WARNING, text, "layers of CUDA images have several GB each", prune)
    else:
        needed = f", {format_size(seen.needed)} needed for {seen.for_what}" if seen.needed else ""
        yield _line(area, Level.OK, text + needed)


def tools(seen: ToolsSeen) -> Iterator[Finding]:
    area = Area.TOOLS
    if seen.builder_error is not None:
        yield of_error(area, seen.builder_error, means=f"recipe {seen.recipe} cannot be built here")
    elif seen.builder:
        yield _line(area, Level.OK, f"{seen.recipe} would be built by {seen.builder}")
    elif not seen.clients:
        yield _line(area, Level.NOTE, "no docker command here", "only recipes without BuildKit's features can be built")
    else:
        yield _line(area, Level.OK, f"docker: {', '.join(seen.clients)}")
    if seen.secret_error is not None:
        yield of_error(area, seen.secret_error, means=f"recipe {seen.recipe} cannot be built without it")
    for name in seen.missing:
        yield _line(
            area,
            Level.PROBLEM,
            f"{name} is not here",
            f"recipe {seen.recipe} makes its base with it",
            f"install the package {name}",
            missing=True,
        )
    if not seen.git:
        yield _line(area, Level.WARNING, "git is not here", "images are labelled without their commit", "install git")
    elif seen.recipe and seen.revision is None:
        yield _line(
            area,
            Level.WARNING,
            f"the folder of {seen.recipe} is in no git repository",
            "the image gets no revision, and tags that name one cannot be made",
            "build from a clone, or give --revision",
        )
    elif seen.recipe:
        changed = ", with changes that are not committed" if seen.dirty else ""
        yield _line(area, Level.OK, f"git: commit {(seen.revision or '')[:12]}{changed}")
    else:
        yield _line(area, Level.OK, "git is here")


# The way -------------------------------------------------------------------------------------------------------------


def way(seen: WaySeen) -> Iterator[Finding]:
    area = Area.WAY
    if seen.proxy is not None:
        yield _line(
            area,
            Level.NOTE,
            f"requests to {seen.origin} go through the proxy {seen.proxy}",
            "the proxy's own limits count, too; name and addresses are its business",
            "NO_PROXY takes a host out of it",
        )
        return
    if seen.dns_error:
        yield _line(
            area,
            Level.PROBLEM,
            f"the name {seen.host} cannot be resolved: {seen.dns_error}",
            "there is no such host, or this machine's resolver does not work",
            f"check the name; `getent hosts {seen.host}`",
        )
        return
    failed = [connect for connect in seen.connects if connect.error]
    described = ", ".join(f"{connect.address}: {connect.error}" for connect in failed)
    if not seen.passable:
        yield _line(
            area,
            Level.PROBLEM,
            f"no connection to {seen.origin} ({described})",
            "nothing listens there, or a firewall is in between",
            "check host and port, and that the registry runs",
        )
        return
    addresses = ", ".join(connect.address for connect in seen.connects if not connect.error)
    yield _line(area, Level.OK, f"{seen.origin} is reached at {addresses}")
    if failed:
        yield _line(
            area,
            Level.WARNING,
            f"not every address of {seen.host} answers ({described})",
            "some connections start with a wait",
            "repair the route to it, or take the address out of the DNS",
        )
    if seen.tls is not None:
        yield from _tls(seen.tls, seen)
    elif not seen.origin.startswith("https:"):
        yield _line(area, Level.OK, "plain http: no TLS, no certificate")


def _tls(seen: TlsSeen, where: WaySeen) -> Iterator[Finding]:
    area = Area.WAY
    if seen.error:
        yield _line(
            area,
            Level.PROBLEM,
            f"TLS with {where.host} failed: {seen.error}",
            "what listens there does not speak TLS, or not to us",
            "--plain-http, if the registry has no TLS",
        )
        return
    if seen.verify:
        yield _not_trusted(seen, where)
        return
    if not seen.verified:
        yield _line(
            area,
            Level.WARNING,
            f"the certificate of {where.host} is not verified, as --insecure asks",
            "whoever sits in between can read the token",
            "give the CA with --ca-bundle instead",
        )
    protocol = {"h2": "HTTP/2 is offered (engines use it; this client speaks HTTP/1.1)"}.get(seen.protocol, "HTTP/1.1")
    until = f", good until {_day(seen.not_after)}" if seen.not_after is not None else ""
    soon = seen.not_after is not None and seen.not_after - where.now < EXPIRES_SOON
    yield _line(
        area,
        Level.WARNING if soon and seen.verified else Level.OK,
        f"{seen.version or 'TLS'}, certificate {'trusted' if seen.verified else 'not looked at'}{until}; {protocol}",
        "the certificate ends within two weeks" if soon and seen.verified else "",
        "renew it" if soon and seen.verified else "",
    )


def _not_trusted(seen: TlsSeen, where: WaySeen) -> Finding:
    names = ", ".join(seen.names[:5]) or "no host at all"
    trust = "give its CA with --ca-bundle FILE, or name the host in --insecure"
    match seen.verify:
        case 10:
            ended = f" on {_day(seen.not_after)}" if seen.not_after is not None else ""
            said = (
                f"the certificate of {where.host} has expired{ended}",
                "no client will connect",
                "renew it on the server; if it is good, this machine's clock is wrong",
            )
        case 9:
            begins = f" before {_day(seen.not_before)}" if seen.not_before is not None else " yet"
            said = (
                f"the certificate of {where.host} is not valid{begins}",
                "this machine's clock is most likely wrong",
                "set the clock (timedatectl set-ntp true)",
            )
        case 62 | 64:
            said = (
                f"the certificate is not for {where.host} but for {names}",
                "another server answers here, or the name is wrong",
                "use a name that the certificate has, or get one for this name",
            )
        case 18:
            said = (
                f"the certificate of {where.host} is self-signed",
                "nobody vouches for it",
                f"{trust}; engines want it in /etc/docker/certs.d/{where.host}/ca.crt",
            )
        case 19 | 20 | 21 | 2:
            said = (
                f"the certificate of {where.host} comes from a CA that is not trusted here ({seen.words})",
                "a CA of one's own, a missing intermediate certificate, or a proxy that opens TLS",
                trust,
            )
        case _:
            said = f"the certificate of {where.host} is not trusted: {seen.words}", "no connection is made", trust
    return _line(Area.WAY, Level.PROBLEM, *said)


def _day(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def greeting(exchange: Exchange, kind: str, version: str | None) -> Iterator[Finding]:
    """Who answers at ``/v2/`` to a client that nobody knows yet."""
    answer = exchange.answer
    if answer is None:
        yield of_error(Area.WAY, error_for(exchange.request, exchange.reply), means="no registry can be spoken to")
        return
    via = shown(answer, answer.headers.get("via", ""), 80)
    spoken = {10: "HTTP/1.0", 11: "HTTP/1.1", 20: "HTTP/2"}.get(answer.version, "HTTP")
    edge = f"{spoken} {answer.status} from {who(answer)}" + (f", via {via}" if via else "")
    if 300 <= answer.status < 400:
        yield of_error(Area.REGISTRY, error_for(exchange.request, answer), means="the registry is at another address")
    elif answer.status == 429:
        told = shown(answer, answer.headers.get("retry-after", ""), 40)
        yield _line(
            Area.REGISTRY,
            Level.PROBLEM,
            f"GET /v2/ got {edge}" + (f", Retry-After: {told}" if told else ""),
            "too many requests came from here: it asks to wait",
            "wait and try again; if it stays, log in, or have the edge's rate limit raised",
        )
    elif answer.status not in (200, 401, 403) or is_html(answer):
        said = f": {summary(answer)}" if answer.body else ""
        yield _line(
            Area.REGISTRY,
            Level.PROBLEM,
            f"GET /v2/ got {edge}{said}",
            "a registry answers 200 or 401 there, without a page: this is something else, or it is out of order",
            "check the address, and what stands before the registry",
        )
    else:
        yield _line(Area.WAY, Level.OK, f"GET /v2/ got {edge}")
        named = f"{kind} {version}" if version else kind
        yield _line(Area.REGISTRY, Level.OK, f"kind: {named}", *_about(kind, version))
    yield from _skew(answer)


def _about(kind: str, version: str | None) -> tuple[str, ...]:
    """What is known of a kind that nobody can see from outside."""
    if kind not in ("Gitea", "Forgejo", "Gitea or Forgejo"):
        return ()
    match = re.match(r"(\d+)\.(\d+)", version or "")
    number = (int(match[1]), int(match[2])) if match else None
    means = "an upload that breaks off in mid-chunk has to start again there; the automatic Actions token cannot push"
    if kind == "Gitea" and number is not None and number < (1, 25):
        means += "; this version counts a session's bytes one too high"
    return (means,)


def _skew(answer: Answer) -> Iterator[Finding]:
    try:
        told = parsedate_to_datetime(answer.headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return
    skew = answer.at - told
    if abs(skew) <= SKEW_WARNING:
        yield _line(Area.WAY, Level.OK, f"clocks agree within {max(1, round(abs(skew)))} s")
        return
    away = f"this machine's clock is {format_duration(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the server's"
    yield _line(
        Area.WAY,
        Level.PROBLEM if abs(skew) >= SKEW_PROBLEM else Level.WARNING,
        away,
        "tokens count as expired or not yet valid, certificates too, and an older build can look like the newer",
        "set the clock that is wrong (timedatectl set-ntp true)",
    )


# Credentials ---------------------------------------------------------------------------------------------------------


def credential(seen: CredentialSeen, registry: str) -> Iterator[Finding]:
    area = Area.CREDENTIALS
    if seen.error is not None and seen.source is None:
        yield of_error(area, seen.error, means="no credential can be had")
        return
    if seen.source is None:
        level = Level.OK if seen.open else Level.PROBLEM
        yield _line(
            area,
            level,
            f"no credential for {registry}",
            "the registry asks for none" if seen.open else "it asks for one",
            "" if seen.open else f"invoke login {registry}, or set REGISTRY_USERNAME and REGISTRY_TOKEN",
        )
        return
    user = f"user {seen.username}" if seen.username else "a token"
    if seen.automatic:
        yield _line(
            area,
            Level.WARNING,
            "the credential is the job's automatic token",
            "Gitea up to 1.27 does not open its container registry to it: a login may work, and the push fails",
            "store a personal token with write:package as the secret REGISTRY_TOKEN",
        )
    refused = f"{user} from {seen.source} is refused: name, password or token is wrong"
    not_tried = f"{user} from {seen.source} could not be tried"
    if seen.error is not None:
        yield of_error(area, seen.error, means=refused if isinstance(seen.error, AuthError) else not_tried)
    elif seen.login is None or seen.login.status != 200:
        if seen.login is not None:
            error = error_for(seen.login.request, seen.login.reply)
            yield of_error(area, error, means=refused if isinstance(error, AuthError) else not_tried)
    elif seen.open:
        yield _line(area, Level.OK, f"{user}, from {seen.source}", "the registry asks for no credential, and takes any")
    else:
        yield _line(area, Level.OK, f"{user}, from {seen.source}, is taken ({seen.scheme or 'basic'} authentication)")


def write(seen: WriteSeen, kind: str) -> Iterator[Finding]:
    area = Area.CREDENTIALS
    if seen.granted:
        yield _line(area, Level.OK, f"may write: an upload was opened ({seen.scope})")
        return
    if seen.error is not None:
        yield of_error(area, seen.error, means=_why_not(seen, seen.error, kind))
        return
    assert seen.opened is not None
    error = error_for(seen.opened.request, seen.opened.reply)
    yield of_error(area, error, means=_why_not(seen, error, kind))


def _why_not(seen: WriteSeen, error: Exception, kind: str) -> str:
    if not isinstance(error, AuthError):
        return "no upload can be opened there"
    said = seen.opened.answer.body.lower() if seen.opened is not None and seen.opened.answer is not None else b""
    package = b"reqpackageaccess" in said
    text = "401: the registry does not take the credential for this"
    if error.status == 403:
        text = "403: the registry knows the credential, and does not let it write here"
    if seen.readable:
        text += "; it may read, so it is a read-only token or a user without the right to write"
    if package or kind in ("Gitea", "Forgejo", "Gitea or Forgejo"):
        text += (
            ". Gitea's reqPackageAccess wants a personal token with write:package, of a user who may write to the "
            "owner's packages; an Actions job's own token does not open the registry"
        )
    return text


# Chunks --------------------------------------------------------------------------------------------------------------


def chunks(seen: ChunksSeen) -> Iterator[Finding]:
    area = Area.CHUNKS
    yield from _location(seen.location)
    if not seen.stored:
        if seen.refusal is not None:
            error = error_for(seen.refusal.request, seen.refusal.reply)
            yield of_error(area, error, means="chunked uploads do not work, and large layers need them")
        elif seen.location.form not in ("unusable", "missing"):
            yield _line(area, Level.NOT_RUN, "no chunk was sent", "the budget is too small, or the connection broke")
        return
    told = {
        "right": "acknowledges a chunk's bytes",
        "one high": "acknowledges one byte too many",
        "not told": "acknowledges a chunk without its bytes",
        "wrong": "acknowledges a wrong number of bytes",
    }.get(seen.acknowledged, "")
    offset = {
        "right": "tells where an upload stands",
        "one high": "tells one byte too many when asked where an upload stands",
        "not told": "does not tell where an upload stands",
        "unsupported": "cannot be asked where an upload stands",
        "lost": "forgets an upload as soon as it is asked about",
        "wrong": "tells a wrong place when asked",
        "failed": "gave no usable answer when asked where an upload stands",
    }.get(seen.offset, "")
    yield _line(area, Level.OK, f"chunks are taken; the registry {told}, and {offset}")
    if seen.content_range == "honoured":
        yield _line(area, Level.OK, "Content-Range is honoured: a chunk for the wrong place is refused")
    elif seen.content_range == "ignored":
        yield _line(
            area,
            Level.NOTE,
            "Content-Range is ignored: a chunk for the wrong place is appended",
            "a client that repeats a chunk blindly spoils the blob; this one asks first, and starts again in doubt",
        )
    elif seen.content_range == "unclear":
        yield _line(area, Level.NOTE, "no clear answer to a chunk for the wrong place")
    yield from _after_break(seen)
    if seen.smallest is not None or seen.largest is not None:
        low = f"at least {format_size(seen.smallest)}" if seen.smallest is not None else ""
        high = f"at most {format_size(seen.largest)}" if seen.largest is not None else ""
        yield _line(
            area,
            Level.OK,
            f"chunks must have {' and '.join(part for part in (low, high) if part)} (OCI-Chunk-…-Length)",
        )
    if seen.quirks:
        names = ",".join(seen.quirks)
        words = "; ".join(f"{quirk} ({_QUIRKS.get(quirk, 'differs')})" for quirk in seen.quirks)
        yield _line(
            Area.REGISTRY,
            Level.NOTE,
            f"quirks: {words}",
            "pushes by this client go around them",
            f"--quirks {names} saves a push the detour of finding them out",
        )


def _after_break(seen: ChunksSeen) -> Iterator[Finding]:
    match seen.after_break:
        case "goes on":
            yield _line(Area.CHUNKS, Level.OK, "resumable: after a chunk that broke off, the upload went on")
        case "starts again":
            yield _line(
                Area.CHUNKS,
                Level.NOTE,
                "not resumable within a chunk: after one that broke off, the upload was lost",
                "a blob whose chunk breaks starts again; between chunks it goes on",
            )
        case "signed":
            yield _line(
                Area.CHUNKS,
                Level.NOTE,
                "an upload's address is signed for its size: a chunk that breaks off was not tried, as nothing could "
                "cancel it",
                "a blob whose chunk breaks starts again; between chunks it goes on",
            )
        case "poisoned":
            yield _line(
                Area.CHUNKS,
                Level.NOTE,
                "a chunk that breaks off poisons the upload: the next got 'offset mismatch'",
                "such a blob is deleted and starts again; clients that do not know this fail for good",
                "smaller chunks lose less (--chunk-size 20MB) where connections break often",
            )
        case "unclear":
            yield _line(Area.CHUNKS, Level.NOTE, "no clear answer after a chunk that broke off")


def _location(seen: LocationSeen) -> Iterator[Finding]:
    area = Area.CHUNKS
    if seen.form == "unusable" or seen.error is not None:
        assert seen.error is not None
        yield of_error(area, seen.error, means="an upload that is opened there cannot go on")
        return
    if seen.form == "missing":
        yield _line(
            area,
            Level.WARNING,
            "uploads come without Location",
            "other clients cannot go on",
            "let the proxy pass the header on",
        )
        return
    if seen.other_host:
        yield _line(
            area,
            Level.WARNING,
            f"uploads are sent on to another host: {seen.host}",
            "it has to be reachable from here, its limits count, and no credential is sent there",
            "if it is the same registry, correct its external URL (X-Forwarded-Host, Host)",
        )
        return
    if seen.other_scheme or seen.other_port is not None:
        wrong = f"the scheme {seen.other_scheme}" if seen.other_scheme else f"the port {seen.other_port}"
        yield _line(
            area,
            Level.WARNING,
            f"uploads are sent on to {seen.host}: {wrong} is not the one that it is reached by",
            "docker push follows that and fails; this client stays with the address that you gave",
            "let the proxy set X-Forwarded-Proto and Host, or correct the registry's external URL (Gitea: ROOT_URL)",
        )
        return
    yield _line(area, Level.OK, f"Location of uploads is {seen.form}, on the same host")


# The limit -----------------------------------------------------------------------------------------------------------


def limit(seen: LimitSeen, options: RegistryOptions) -> Iterator[Finding]:
    area = Area.LIMIT
    known = seen.known
    if seen.error is not None:
        yield of_error(area, seen.error, level=Level.WARNING, means="the measurement ended early")
    if known.refused is None:
        yield _nothing_refused(seen, options)
        return
    exact = known.refused == known.accepted + 1
    between = (
        f"exactly {_bytes(known.accepted)}"
        if exact
        else f"between {_bytes(known.accepted)} and {_bytes(known.refused)}"
    )
    by = _by(seen)
    if seen.broke:
        yield _line(
            area,
            Level.WARNING,
            f"{_bytes(known.accepted)} went through, bodies of {_bytes(known.refused)} break; {by}",
            "nobody says that it is their size: a time-out, a firewall, a proxy that gives up, or a network that fails",
            f"smaller chunks: --chunk-size {_flag(known.accepted)}",
        )
        return
    wanted = options.effective_chunk
    more = {"budget": "a larger --budget finds it more precisely", "time": "a faster line finds it more precisely"}.get(
        seen.stopped, ""
    )
    if known.accepted >= wanted:
        yield _line(
            area, Level.OK, f"the largest body is {between}; {by}", f"chunks of {format_size(wanted)} fit", more
        )
    elif known.refused <= options.smallest_chunk:
        yield _line(
            area,
            Level.PROBLEM,
            f"the largest body is {between}; {by}",
            "no chunk is small enough for that",
            _raise_it(seen),
        )
    elif known.refused <= wanted:
        yield _line(
            area,
            Level.WARNING,
            f"the largest body is {between}; {by}",
            f"chunks of {format_size(wanted)}, the setting, are refused; a push finds that out and halves them",
            f"--limit {_flag(known.accepted)} (recipe: push.limit), or {_raise_it(seen)}",
        )
    else:
        yield _line(
            area,
            Level.NOTE,
            f"the largest body is {between}; {by}",
            f"whether chunks of {format_size(wanted)} fit is open",
            more,
        )


def _nothing_refused(seen: LimitSeen, options: RegistryOptions) -> Finding:
    known, wanted = seen.known, options.effective_chunk
    passed = f"bodies of {_bytes(known.accepted)} go through, and none was refused"
    if seen.stopped == "registry's maximum":
        return _line(Area.LIMIT, Level.OK, passed, "the registry itself asks for no larger ones")
    if seen.stopped == "error" and seen.by is not None:
        return _line(
            Area.LIMIT,
            Level.WARNING,
            f"{passed}, then uploads failed; {_by(seen)}",
            "this is not about sizes",
            "try again; if it stays, look at the registry's log",
        )
    if known.accepted >= wanted:
        return _line(
            Area.LIMIT, Level.OK, passed, f"the limit is higher, if there is one; chunks of {format_size(wanted)} fit"
        )
    return _line(
        Area.LIMIT,
        Level.NOTE,
        passed,
        f"chunks of {format_size(wanted)}, the setting, were not tried ({seen.stopped})",
        f"--budget {_flag(2 * wanted)}",
    )


def learned(known: LearnedLimit, options: RegistryOptions) -> Finding:
    """What an earlier push or measurement has left."""
    return _line(
        Area.LIMIT,
        Level.OK if known.accepted >= options.effective_chunk else Level.NOTE,
        f"remembered since {_day(known.at)}: {_bytes(known.accepted)} go through, {_bytes(known.refused)} do not",
        "pushes keep their chunks below that",
    )


def limit_by(seen: LimitSeen) -> str:
    """Who refused, in words; empty where nobody did."""
    return _by(seen) if seen.known.refused is not None else ""


def _by(seen: LimitSeen) -> str:
    if seen.by is None:
        return "the connection broke"
    answer = seen.by.answer
    if answer is None:
        return f"no answer: {describe(seen.by.request, seen.by.reply)}"
    said = summary(answer).removeprefix("an HTML page: ")
    if said.startswith(str(answer.status)):
        said = ""  # nginx's page says the status once more
    kind = (
        "an edge's page" if is_html(answer) else "the registry itself" if answer.body[:1] == b"{" else "whoever it is"
    )
    return f"HTTP {answer.status} from {who(answer)} ({kind})" + (f": {one_line(said, 100)}" if said else "")


def _raise_it(seen: LimitSeen) -> str:
    answer = seen.by.answer if seen.by is not None else None
    server = answer.headers.get("server", "").lower() if answer is not None else ""
    if "nginx" in server:
        return "raise client_max_body_size if this nginx is yours"
    if "cloudflare" in server:
        return "a plan with a higher limit, or a host name that does not pass Cloudflare"
    return "raise it where it is set"


def _bytes(count: int) -> str:
    """With the exact number: 100 MB and 100 MiB are not the same."""
    named = f" = {count // 2**20} MiB" if count >= 2**20 and count % 2**20 == 0 else ""
    return f"{format_size(count)} ({count:,}{named})"


def _flag(count: int) -> str:
    return f"{count // 10**6}MB" if count >= 10**7 else f"{count // 1000}kB" if count >= 10**4 else str(count)


# docker push ---------------------------------------------------------------------------------------------------------


def docker_push(
    seen: ImageSeen, options: RegistryOptions, measured: LimitSeen | None, learned: LearnedLimit | None
) -> Iterator[Finding]:
    """Whether a client that sends each layer as one body would get this image through, and why not."""
    area = Area.DOCKER_PUSH
    if seen.error is not None:
        yield of_error(area, seen.error, means="its layers' sizes are not known")
        return
    passes, fails, source = _edge(options, measured, learned)
    if passes is None:
        yield _line(area, Level.OK, "docker push would work: no limit for one body is known", source)
        return
    too_large, doubtful, unknown = [], [], []
    for layer in seen.layers:
        low, high = _sizes(layer)
        if low is None or high is None:
            unknown.append(layer.label)
        elif low >= (fails if fails is not None else passes + 1):
            too_large.append(_described(layer))
        elif high > passes:
            doubtful.append(_described(layer))
    how = (
        "`invoke push` sends it in chunks; `invoke split` divides the layers, so that any client can push and pull them"
    )
    if too_large:
        yield _line(
            area,
            Level.WARNING,
            f"docker push would fail for {', '.join(too_large[:8])} of {seen.name}",
            f"it sends each layer as one body, and {format_size(passes)} is what goes through ({source})",
            how,
        )
    if doubtful or unknown:
        names = ", ".join([*doubtful, *(f"{label} (size not known)" for label in unknown)][:8])
        yield _line(
            area,
            Level.NOTE,
            f"docker push may fail for {names} of {seen.name}",
            f"how small they get is seen when they are compressed; {format_size(passes)} goes through ({source})",
            how,
        )
    if not too_large and not doubtful and not unknown:
        largest = max((layer.size or layer.tar_size or 0 for layer in seen.layers), default=0)
        yield _line(
            area,
            Level.OK,
            f"docker push would work for {seen.name}: its largest layer has {format_size(largest)}",
            f"{format_size(passes)} goes through ({source})",
        )


def _edge(
    options: RegistryOptions, measured: LimitSeen | None, learned: LearnedLimit | None
) -> tuple[int | None, int | None, str]:
    """What passes, what does not (None: not known), and how that is known."""
    if measured is not None and (measured.known.refused is not None or measured.known.accepted > options.body_limit):
        return measured.known.accepted, measured.known.refused, "measured"
    if learned is not None:
        return learned.accepted, learned.refused, "learned by an earlier push"
    if options.limit is None:
        return None, None, "the settings name none"
    return options.limit, None, "assumed, by the settings: not measured"


def _sizes(layer: LayerSeen) -> tuple[int | None, int | None]:
    """The least and the most that it may have when it is sent."""
    if layer.size is not None:
        return layer.size, layer.size
    if layer.tar_size is not None:
        return int(layer.tar_size * COMPRESSION[0]), int(layer.tar_size * COMPRESSION[1])
    return None, None


def _described(layer: LayerSeen) -> str:
    if layer.size is not None:
        return f"{layer.label} ({format_size(layer.size)})"
    return f"{layer.label} ({format_size(layer.tar_size or 0)} before compression)"


# Tidiness ------------------------------------------------------------------------------------------------------------


def sessions(seen: SessionsSeen) -> Iterator[Finding]:
    if seen.left:
        reasons = one_line("; ".join(sorted(set(seen.left))), 300)
        yield _line(
            Area.TIDINESS,
            Level.WARNING,
            f"{len(seen.left)} of {seen.opened} uploads could not be cancelled: {reasons}",
            "the registry removes them itself after a day or a week",
        )
